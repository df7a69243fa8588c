"""The folder in which a campaign keeps each run as a file of its own, before anything is fitted to it."""

import json
from pathlib import Path

from calibration.observation_json import observation_from_json, observation_name, observation_to_json
from calibration.probe.request import Gpu, ProbeRequest
from planner._support.atomic_write import write_bytes
from planner.errors import DataFileError
from planner.hardware.calibration import Observation, Settings

LARGEST_FILE_BYTES = 2**20


def observation_path(folder: Path, request: ProbeRequest, gpu: Gpu) -> Path:
    """The file of this request on this card with this version of torch; equal requests, equal files."""
    settings = Settings(
        gpu.settings.matmul_tf32,
        gpu.settings.cudnn_tf32,
        request.alloc_conf,
        request.allocator_cap_bytes,
    )
    name = observation_name(request.job, request.batch, settings, gpu.name, gpu.versions.torch)
    return folder / f"{name}.json"


def path_of(observation: Observation, folder: Path) -> Path:
    """The file of a run that was made already; the same as that of the request that made it."""
    run = observation
    name = observation_name(run.job, run.batch, run.settings, run.gpu, run.versions.torch)
    return folder / f"{name}.json"


def history_path(path: Path) -> Path:
    """Where the allocator's history lies beside the file of a run."""
    return path.with_name(f"{path.stem}.history.json.gz")


def save_observation(observation: Observation, path: Path) -> None:
    """Write one run, whole or not at all. Raises DataFileError."""
    text = json.dumps(observation_to_json(observation), indent=1, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def load_observation(path: Path) -> Observation:
    """Read one run. Raises DataFileError for anything that `save_observation` never wrote."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise ValueError(f"more than {LARGEST_FILE_BYTES} bytes")
        return observation_from_json(json.loads(content.decode()))
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path}: broken observation: {problem}; remove it to measure anew") from error


def load_observations(folder: Path) -> tuple[Observation, ...]:
    """All runs of a folder, by file name; none where there is no folder. Raises DataFileError."""
    names = sorted(folder.glob("*.json"))
    return tuple(load_observation(path) for path in names)
