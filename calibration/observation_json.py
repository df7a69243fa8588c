"""An observation as JSON and back: what a probe answers, and what a campaign keeps of each run.

Reading is strict: a missing, unknown or mistyped key is a ValueError that names it.
"""

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from hashlib import sha256
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar

from planner.errors import UsageError
from planner.hardware.calibration import Observation, Settings, Versions
from planner.jobs import Job, job_from_json, job_to_json

T = TypeVar("T")


def observation_to_json(observation: Observation) -> dict[str, Any]:
    """All fields, as `json` writes them; `observation_from_json` is the inverse."""
    return {
        field.name: getattr(observation, field.name)
        for field in fields(Observation)
        if field.name not in ("job", "versions", "settings")
    } | {
        "job": job_to_json(observation.job),
        "versions": asdict(observation.versions) | {"capability": list(observation.versions.capability)},
        "settings": asdict(observation.settings),
    }


def observation_from_json(said: object) -> Observation:
    """What `observation_to_json` described. Raises ValueError for anything that it never wrote."""
    if not isinstance(said, Mapping):
        raise ValueError("no mapping")
    job, settings = read_job(said.get("job")), said.get("settings")
    if isinstance(settings, Mapping) and "cudnn_benchmark" in settings:  # until it became part of the job
        benchmark = _scalar("cudnn_benchmark", settings["cudnn_benchmark"], bool)
        settings = {key: value for key, value in settings.items() if key != "cudnn_benchmark"}
        job = replace(job, cudnn_benchmark=job.cudnn_benchmark or benchmark is True)
    return read_flat(
        Observation,
        said,
        job=job,
        versions=read_versions(said.get("versions")),
        settings=read_flat(Settings, settings),
    )


def read_job(said: object) -> Job:
    """What `job_to_json` described. Raises ValueError for anything else."""
    try:
        return job_from_json(said)  # type: ignore[arg-type]
    except (UsageError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"job: {type(error).__name__}: {error}") from error


def read_versions(said: object) -> Versions:
    """The versions of a run. Raises ValueError."""
    capability = said.get("capability") if isinstance(said, Mapping) else None
    if not (isinstance(capability, list) and [type(part) for part in capability] == [int, int]):
        raise ValueError("capability: two whole numbers are wanted")
    return read_flat(Versions, said, capability=tuple(capability))


def read_flat(kind: type[T], said: object, **done: Any) -> T:
    """A dataclass whose fields are scalars, save those that are `done` already. Raises ValueError."""
    if not isinstance(said, Mapping):
        raise ValueError(f"{kind.__name__.lower()}: no mapping")
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in said:
        if key not in known:
            raise ValueError(f"{key}: unknown key")
    values = dict(done)
    for name, field in known.items():
        if name in done:
            continue
        if name in said:
            values[name] = _scalar(name, said[name], hints[name])
        elif field.default is MISSING:
            raise ValueError(f"{name}: missing")
    return kind(**values)


def observation_name(job: Job, batch: int, settings: Settings, gpu: str, torch: str) -> str:
    """The name of the file of a run: readable in front, different for different runs by its end."""
    said = [job_to_json(job), batch, asdict(settings), gpu, torch]
    digest = sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9]+", "-", job.model).strip("-")[-40:]
    return f"{readable}-b{batch}-{digest}"


def _scalar(name: str, value: object, hint: Any) -> object:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (UnionType, typing.Union) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            if value in typing.get_args(kind):
                return value
        elif type(value) is kind:
            return value
    wanted = " or ".join(
        "null" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds
    )
    raise ValueError(f"{name}: {str(value)[:40]!r} is no {wanted}")
