"""Convert a framework's DeepSpeed configuration to a job's fields."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner._support.bounded_read import LARGEST_CODE_BYTES, read_text
from planner.errors import UsageError
from planner.jobs import ClipGradients, Precision, read_deepspeed

_FILLED = "auto"
NOTES = (
    "DeepSpeed's engine shards the model from a whole one on the CPU; from_pretrained with stage 3 loads it "
    "sharded",
)


def deepspeed_fields(
    given: str | Mapping[str, Any], fields: Mapping[str, Any], ranks: int, owner: str
) -> dict[str, Any]:
    """Return a copy of a job's fields, updated from DeepSpeed's configuration for training on `ranks` ranks.

    `fields` are the job's fields from a framework. `given` is DeepSpeed's configuration or the name of its
    file; `owner` names the setting in errors. `ranks` is the number of processes, which a user's `world_size`
    overrides. Raises UsageError for settings that are not planned.
    """
    config = _config_of(given, owner)
    config.pop("steps_per_print", None)  # infinite under accelerate, which JSON lacks
    config["zero_allow_untested_optimizer"] = True  # accelerate/accelerator.py, _prepare_deepspeed
    clips = "gradient_clipping" in config and fields.get("clip_gradients") is not ClipGradients.NONE
    return {
        **fields,
        "deepspeed": read_deepspeed(json.dumps(config), owner),
        "world_size": ranks if ranks > 1 else 0,
        "precision": _precision_left(config, fields["precision"], owner),
        "grad_scaler": False,  # the engine has its own
        "clip_gradients": ClipGradients.NORM if clips else ClipGradients.NONE,
        "ddp": False,
        "ddp_bucket_view": False,
    }


def _config_of(given: str | Mapping[str, Any], owner: str) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    try:
        read = json.loads(read_text(Path(given), LARGEST_CODE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{owner}: {given} cannot be read: {error}; name DeepSpeed's JSON file") from error
    if not isinstance(read, dict):
        raise UsageError(f"{owner}: {given} has no object; name DeepSpeed's JSON file")
    return read


def _precision_left(config: Mapping[str, Any], precision: Precision, owner: str) -> Precision:
    """Return a job's precision, or FP32 if DeepSpeed's configuration sets the precision itself.

    The precision is kept if the configuration has "auto" for it, or if the job does not use autocast. Raises
    UsageError if the configuration does not enable the autocast precision of the job.
    """
    wanted = {Precision.AMP_BF16: "bf16", Precision.AMP_FP16: "fp16"}.get(precision)
    if wanted is None:
        return precision
    enabled = (config.get(wanted) or {}).get("enabled", False)
    if not enabled:
        raise UsageError(f"{owner}: {wanted} is on in the arguments and not in it; add {wanted}.enabled=auto")
    return precision if enabled == _FILLED else Precision.FP32
