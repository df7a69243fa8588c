"""Convert observations to and from JSON.

Probes reply with them, and campaigns store them in files.
"""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from planner._support.atomic_write import write_bytes
from planner._support.bounded_read import read_bytes
from planner._support.conversion import convert
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration import Observation, Settings
from planner.jobs import Job, job_from_json, job_to_json

LARGEST_FILE_BYTES = 2**20


def observation_to_json(observation: Observation) -> dict[str, Any]:
    """Convert an observation to JSON data. `observation_from_json` is the inverse."""
    fields: dict[str, Any] = msgspec.to_builtins(asdict(observation) | {"job": job_to_json(observation.job)})
    return fields


def observation_from_json(document: object) -> Observation:
    """Convert JSON data to an observation. Raises ValueError for a missing, unknown or mistyped key."""
    if not isinstance(document, Mapping):
        raise ValueError("expected keys with values")
    job, settings = read_job(document.get("job")), document.get("settings")
    if isinstance(settings, Mapping) and "cudnn_benchmark" in settings:  # written before jobs had the option
        benchmark = convert(settings["cudnn_benchmark"], bool)
        settings = {key: value for key, value in settings.items() if key != "cudnn_benchmark"}
        job = job.replace(cudnn_benchmark=job.environment.cudnn_benchmark or benchmark)
    return convert({**document, "job": job, "settings": settings}, Observation)


def read_job(document: object) -> Job:
    """Convert JSON data to a job. Raises ValueError for data that `job_to_json` cannot have written."""
    try:
        return job_from_json(document)  # type: ignore[arg-type]
    except (UsageError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"job: {type(error).__name__}: {error}") from error


def run_path(folder: Path, job: Job, batch: int, settings: Settings, gpu: str, torch: str) -> Path:
    """Return the path of a run's file, whose name has a hash of job, batch, settings, GPU and torch."""
    key = [job_to_json(job), batch, asdict(settings), gpu, torch]
    digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9]+", "-", job.model.name).strip("-")[-40:]
    return folder / f"{readable}-b{batch}-{digest}.json"


def observation_path(folder: Path, run: Observation) -> Path:
    """Return the path in a folder at which an observation is stored."""
    return run_path(folder, run.job, run.batch, run.settings, run.gpu, run.versions.torch)


def save_observation(observation: Observation, path: Path) -> None:
    """Write an observation to a file atomically. Raises DataFileError if the file cannot be written."""
    text = json.dumps(observation_to_json(observation), indent=1, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def load_observation(path: Path) -> Observation:
    """Read an observation from a file. Raises DataFileError for a file that is unreadable or broken."""
    try:
        return observation_from_json(msgspec.json.decode(read_bytes(path, LARGEST_FILE_BYTES)))
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path}: broken observation: {problem}; remove it to measure again") from error
