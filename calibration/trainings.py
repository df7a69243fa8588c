"""Store training runs that `planner.guard` measured, and calibrate with them."""

from importlib.metadata import version
from pathlib import Path

from msgspec.structs import replace

from calibration.observations import load_observation, observation_path, save_observation
from planner.allocator import UNLIMITED, AllocatorConfig, replay_trace
from planner.emulator import default_source
from planner.hardware.calibration import (
    Fit,
    Observation,
    Origins,
    Point,
    add_points,
    fit_points,
    key_of,
    origin_of,
)
from planner.program import Trace, has_convolutions

RUNS = "runs"


def keep_training(seen: Observation, trace: Trace, config: AllocatorConfig, folder: Path) -> tuple[Path, str]:
    """Store an observation of a training run, add it to its calibration, and return its path and a remark.

    Returns the path in `runs/`, and a text on the outcome. `trace` is the trace of the training run at its
    batch size, and `config` the allocator's configuration. The text says whether the calibration has a line.
    A run that is already stored with the same peaks is not added again, and a run under a cap is not added to
    a calibration. Raises DataFileError if a file cannot be written or is broken.
    """
    path = observation_path(folder / RUNS, seen)
    if path.exists() and _peaks(load_observation(path)) == _peaks(seen):
        return path, "the same peaks stood there"
    save_observation(seen, path)
    if seen.settings.allocator_cap_bytes is not None:
        return path, "a run under a cap shows a limit and no line"
    if not seen.job.environment.cudnn and has_convolutions(trace):
        seen = replace(seen, job=seen.job.replace(cudnn=default_source(seen.job)))
    replayed = replay_trace(trace, replace(UNLIMITED, config=config)).peak_reserved_bytes
    origins = Origins(origin_of(seen.gpu), "", version("torch"))
    stands = add_points(folder, key_of(seen), [Point(seen, replayed)], origins, fit_points)
    if isinstance(stands.fit, Fit):
        return path, f"the calibration has a line through {stands.fit.points} runs"
    return path, f"no line yet, with {len(stands.points)} of its runs ({stands.fit.reason})"


def _peaks(seen: Observation) -> tuple[int | None, ...]:
    return seen.peak_allocated_bytes, seen.peak_reserved_bytes, seen.process_peak_bytes
