"""Convert jobs to and from the JSON of reports, saved traces and calibrations."""

from collections.abc import Mapping
from math import isinf
from typing import Any

from planner.jobs.job import JOB_FIELDS, Job, TensorSpec
from planner.jobs.options import FIELD_OPTIONS
from planner.jobs.parse import freeze, parse_tensor_spec

_DEFAULTS = Job.create("")
_REQUIRED = (  # present in files of every version
    *("model", "source", "model_args", "inputs", "target", "loss", "mode", "optimizer", "optimizer_impl"),
    *("zero_grad", "keep_grads", "steps"),
)


def job_to_json(job: Job) -> dict[str, Any]:
    """Return all fields of a job as values that `json` can encode. `job_from_json` is the inverse."""
    values = {name: job.value(name) for name in JOB_FIELDS}
    values |= {name: option.write(values[name]) for name, option in FIELD_OPTIONS.items()}
    values |= {name: dict(values[name]) for name in ("model_args", "optimizer_args")}
    return {name: _plain(value) for name, value in values.items()}


def job_from_json(values: Mapping[str, Any]) -> Job:
    """Convert values from `job_to_json` to a job. Raises UsageError, KeyError, TypeError, AttributeError."""
    for name in _REQUIRED:
        values[name]
    for name in ("model", "source"):
        if not isinstance(values[name], str):
            raise TypeError(f"{name}: expected a string")
    deepspeed = values.get("deepspeed") or "{"
    if not (isinstance(deepspeed, str) and deepspeed.startswith("{")):
        raise TypeError("deepspeed: expected a configuration, no path")
    target = values["target"]
    options = {
        name: option.read(values[name], name)
        for name, option in FIELD_OPTIONS.items()
        if name in values and not _is_default(name, values[name])
    }
    return Job.create(
        model=values["model"],
        source=values["source"],
        model_args=_arguments(values["model_args"]),
        optimizer_args=_arguments(values.get("optimizer_args", {})),
        inputs=tuple(map(parse_tensor_spec, values["inputs"])),
        target=None if target is None else parse_tensor_spec(target),
        targets=tuple(map(parse_tensor_spec, values.get("targets", ()))),
        **options,
    )


def _arguments(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((str(key), freeze(value)) for key, value in values.items())


def _is_default(name: str, value: object) -> bool:
    """Return whether a value is its field's default. Users cannot give some defaults."""
    default = _DEFAULTS.value(name)
    return type(value) is type(default) and value == default


def _plain(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return str(value)
    if isinstance(value, float) and isinf(value):  # JSON has no infinity; `freeze` converts this text to it
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
