"""A job as JSON and back: what the JSON reports and a saved trace say about it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from planner.job import (
    Job,
    Loss,
    Mode,
    Optimizer,
    OptimizerImpl,
    ZeroGrad,
    check_count,
    choose,
    freeze,
    parse_tensor_spec,
)
from planner.resolve import MAX_STEPS

T = TypeVar("T")


def job_to_json(job: Job) -> dict[str, Any]:
    """All options of the job, as `json` writes them; `job_from_json` is the inverse."""
    return asdict(job) | {
        "model_args": {key: _thaw(value) for key, value in job.model_args},
        "inputs": [str(spec) for spec in job.inputs],
        "target": None if job.target is None else str(job.target),
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
        loss=choose(Loss, said["loss"], "loss"),
        mode=choose(Mode, said["mode"], "mode"),
        optimizer=choose(Optimizer, said["optimizer"], "optimizer"),
        optimizer_impl=choose(OptimizerImpl, said["optimizer_impl"], "optimizer_impl"),
        zero_grad=choose(ZeroGrad, said["zero_grad"], "zero_grad"),
        keep_grads=_checked(said["keep_grads"], bool),
        steps=check_count("steps", said["steps"], MAX_STEPS),
    )


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _thaw(value: Any) -> Any:
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value
