"""Read and check DeepSpeed's configuration.

Settings that are not planned are refused, and "auto" is replaced by values. The keys are from DeepSpeed 0.19
(runtime/constants.py, runtime/zero/config.py).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner._support.bounded_read import read_text
from planner.errors import UsageError
from planner.jobs.job import ClipGradients, Job, Precision
from planner.jobs.parse import shown

MOST_CHARACTERS = 100_000
DEFAULT_CLIP = 1.0  # transformers' max_grad_norm
_ADAM = ("adam", "adamw")
_FILLED = "auto"

# Settings that are planned, or that do not affect memory.
_PLANNED = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16
    zero_optimization optimizer scheduler zero_allow_untested_optimizer steps_per_print prescale_gradients
    gradient_predivide_factor communication_data_type data_types wall_clock_breakdown dump_state seed
"""
_PLANNED_OF_ZERO = """
    stage reduce_bucket_size allgather_bucket_size allgather_partitions reduce_scatter overlap_comm
    contiguous_gradients round_robin_gradients sub_group_size ignore_unused_parameters
    stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold
    max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold
    model_persistence_threshold stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save load_from_fp32_weights
    elastic_checkpoint
"""
# transformers fills these by the hidden size (integrations/deepspeed.py).
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def read_deepspeed(text: str, where: str = "--deepspeed") -> str:
    """Check a configuration of DeepSpeed, given as JSON or a path, and return JSON with sorted keys.

    Returns "" for "". `where` names the origin of the configuration in errors. Raises UsageError for a file
    that cannot be read, for text that is no configuration, and for settings that are not planned.
    """
    if not text:
        return ""
    if not text.lstrip().startswith("{"):
        where = f"{where} {text}"
        try:
            text = read_text(Path(text), MOST_CHARACTERS)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{where}: cannot be read: {reason}; name DeepSpeed's JSON file") from error
    try:
        config = json.loads(text[: MOST_CHARACTERS + 1])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: is no JSON: {error}; name DeepSpeed's JSON file") from error
    if not isinstance(config, dict):
        raise UsageError(f"{where}: expected an object, got {shown(str(config))}")
    for problem in _problems(config):
        raise UsageError(f"{where}: {problem}; planner run emulates such a script")
    return json.dumps(config, sort_keys=True)


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield descriptions of the settings of a configuration that are invalid or not planned."""
    zero = config.get("zero_optimization", {})
    for name in ("zero_optimization", "bf16", "fp16", "optimizer", "data_types"):
        if not isinstance(config.get(name, {}), dict):
            yield f"{name} has to be an object"
            return
    for key, value in config.items():
        if key not in _PLANNED.split() and value not in (None, False, {}):
            yield f"{key} is not planned"
    for key, value in zero.items():
        is_off = value in (None, False, {}) or (isinstance(value, dict) and value.get("device") == "none")
        if key not in _PLANNED_OF_ZERO.split() and not is_off:
            yield f"zero_optimization.{key} is not planned"
    if zero.get("stage") not in (1, 2, 3):
        yield "zero_optimization.stage has to be 1, 2 or 3"
    kind = str(config.get("optimizer", {}).get("type", "AdamW")).lower()
    if kind not in _ADAM:
        yield f"optimizer.type {shown(kind)} is not planned; remove optimizer and give --optimizer"


def deepspeed_stage(job: Job) -> int:
    """Return the ZeRO stage of a job, or 0 without DeepSpeed."""
    return (
        int(json.loads(job.sharding.deepspeed)["zero_optimization"]["stage"]) if job.sharding.deepspeed else 0
    )


def precision_agrees(job: Job) -> bool:
    """Return whether the job's precision agrees with the precision of its DeepSpeed configuration.

    A job in float32 agrees with any configuration. "auto" stands for autocast or for the pure type, as with
    transformers' `bf16`.
    """
    config = json.loads(job.sharding.deepspeed)
    for name, precisions in _PRECISIONS.items():
        if job.loop.precision in precisions:
            enabled = config.get(name, {}).get("enabled", False)
            return enabled == _FILLED or (enabled is True and job.loop.precision is precisions[0])
    return True


def model_precision(job: Job) -> Precision:
    """Return the precision of the job's model after any conversion by DeepSpeed's configuration."""
    if job.sharding.deepspeed:
        config = json.loads(job.sharding.deepspeed)
        for name, precisions in _PRECISIONS.items():
            enabled = config.get(name, {}).get("enabled", False)
            if enabled is True or (enabled == _FILLED and job.loop.precision in precisions):
                return precisions[0]
    return job.loop.precision


def fill_deepspeed(job: Job, batch: int, hidden_size: int | None) -> dict[str, Any]:
    """Return a job's configuration for DeepSpeed's engine at a batch size, without "auto" values.

    Values that are "auto" are taken from the job, as transformers fills them; in `zero_optimization` they
    follow from the hidden size, or are deleted so that DeepSpeed's defaults apply. Raises UsageError if a
    value cannot be determined.
    """
    config: dict[str, Any] = json.loads(job.sharding.deepspeed)
    config.pop("train_batch_size", None)
    config.pop("scheduler", None)  # it only sets a number for each step
    config["train_micro_batch_size_per_gpu"] = batch
    if config.get("gradient_accumulation_steps", _FILLED) == _FILLED:
        config["gradient_accumulation_steps"] = job.loop.accumulate
    if config.get("gradient_clipping", 0.0) == _FILLED or job.loop.clip_gradients is ClipGradients.NORM:
        clips = job.loop.clip_gradients is ClipGradients.NORM
        given = config.get("gradient_clipping", _FILLED)
        config["gradient_clipping"] = given if given != _FILLED else DEFAULT_CLIP if clips else 0.0
    for name, precisions in _PRECISIONS.items():
        section = config.get(name, {})
        if section.get("enabled") == _FILLED:
            section["enabled"] = job.loop.precision in precisions
        _drop_filled(section)
    parameters = config.get("optimizer", {}).get("params", {})
    _drop_filled(parameters)
    zero = config["zero_optimization"]
    for key, value in list(zero.items()):
        if value != _FILLED:
            continue
        if key in _BY_HIDDEN_SIZE and hidden_size is not None:
            zero[key] = _BY_HIDDEN_SIZE[key](hidden_size)
        else:
            del zero[key]
    for key, value in config.items():
        if value == _FILLED:
            raise UsageError(f'--deepspeed: {key} is "auto", which nothing decides here; give its value')
    return config


_PRECISIONS = {
    "bf16": (Precision.BF16, Precision.AMP_BF16),
    "fp16": (Precision.FP16, Precision.AMP_FP16),
}


def _drop_filled(section: dict[str, Any]) -> None:
    """Delete the settings of a section that are "auto", such as learning rates and loss scales."""
    for key, value in list(section.items()):
        if value == _FILLED:
            del section[key]
