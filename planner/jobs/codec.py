"""A job as JSON and back: what the JSON reports and a saved trace say about it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from planner.jobs.job import (
    Checkpoint,
    ClipGradients,
    Job,
    Lengths,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    ZeroGrad,
    check_count,
    choose,
    freeze,
    parse_loss,
    parse_tensor_spec,
)
from planner.jobs.resolve import COUNTS, MAX_STEPS
from planner.program import parse_workspace_config

T = TypeVar("T")


def job_to_json(job: Job) -> dict[str, Any]:
    """All options of the job, as `json` writes them; `job_from_json` is the inverse."""
    return asdict(job) | {
        "model_args": {key: _thaw(value) for key, value in job.model_args},
        "inputs": [str(spec) for spec in job.inputs],
        "target": None if job.target is None else str(job.target),
        "targets": [str(spec) for spec in job.targets],
        "freeze": list(job.freeze),
        "train_only": list(job.train_only),
    }


def job_from_json(said: Mapping[str, Any]) -> Job:
    """The job that `job_to_json` described.

    Raises UsageError, KeyError, TypeError or AttributeError where `said` is nothing that it wrote.
    """
    return Job(
        model=_checked(said["model"], str),
        source=_checked(said["source"], str),
        model_args=tuple((_checked(key, str), freeze(value)) for key, value in said["model_args"].items()),
        inputs=tuple(parse_tensor_spec(text) for text in said["inputs"]),
        target=None if said["target"] is None else parse_tensor_spec(said["target"]),
        loss=parse_loss(said["loss"]),
        mode=choose(Mode, said["mode"], "mode"),
        optimizer=choose(Optimizer, said["optimizer"], "optimizer"),
        optimizer_impl=choose(OptimizerImpl, said["optimizer_impl"], "optimizer_impl"),
        zero_grad=choose(ZeroGrad, said["zero_grad"], "zero_grad"),
        keep_grads=_checked(said["keep_grads"], bool),
        steps=check_count("steps", said["steps"], MAX_STEPS),
        **_added_later(said),
    )


_FLAGS = (
    *("grad_scaler", "backward_in_autocast", "ema", "evaluate", "ddp", "ddp_bucket_view"),
    "cudnn_benchmark",
)
_CHOICES = {
    "precision": Precision,
    "memory_format": MemoryFormat,
    "checkpoint": Checkpoint,
    "clip_gradients": ClipGradients,
}


def _added_later(said: Mapping[str, Any]) -> dict[str, Any]:
    """Options that files of the first version did not have; what is missing keeps the default."""
    fields: dict[str, Any] = {}
    for name, kind in _CHOICES.items():
        if name in said:
            fields[name] = choose(kind, said[name], name)
    for name in _FLAGS:
        if name in said:
            fields[name] = _checked(said[name], bool)
    fields["targets"] = tuple(parse_tensor_spec(text) for text in said.get("targets", ()))
    for name in ("freeze", "train_only"):
        if name in said:
            fields[name] = tuple(_checked(pattern, str) for pattern in said[name])
    if "accumulate" in said:
        fields["accumulate"] = check_count("accumulate", said["accumulate"], COUNTS["accumulate"])
    for name in ("new_tokens", "eval_batch", "dataset_size"):  # 0 stands for none
        if said.get(name, 0) != 0:
            fields[name] = check_count(name, said[name], COUNTS[name])
    if said.get("lengths") is not None:
        fields["lengths"] = choose(Lengths, said["lengths"], "lengths")
    fields["cudnn"] = _checked(said.get("cudnn", ""), str)
    config = _checked(said.get("cublas_workspace_config", ""), str)
    if config:
        parse_workspace_config(config)
        fields["cublas_workspace_config"] = config
    return fields


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _thaw(value: Any) -> Any:
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value
