"""Running a campaign: which probes are still to be made, one after the other, until the time is up.

Each run is written as it comes. A later call with the same folder goes on where this one stopped.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from calibration.campaign_file import Series
from calibration.limits import Limit, find_limit, guess_limit
from calibration.observation_file import history_path, load_observation, observation_path, save_observation
from calibration.probe.client import Measure
from calibration.probe.request import Gpu, ProbeRequest
from planner.errors import ModelError, UsageError
from planner.hardware import MIB
from planner.hardware.calibration import Observation
from planner.jobs import Job
from planner.planning import OnProgress

SHORTEST_PROBE_SECONDS = 15  # with less time left none is begun
LONGEST_PROBE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Lab:
    """Where runs are made and kept."""

    gpu: Gpu
    folder: Path  # one file for each run
    measure: Measure
    seconds_left: Callable[[], float]
    tell: OnProgress  # hears one short line for each run


@dataclass(frozen=True, slots=True)
class FoundLimit:
    """The true largest batch of a job under an allocator cap."""

    job: Job
    cap_bytes: int
    limit: Limit


@dataclass(frozen=True, slots=True)
class Harvest:
    """What a call brought."""

    observations: tuple[Observation, ...]  # of all runs asked for that are there now, in the campaign's order
    limits: tuple[FoundLimit, ...]
    new: int  # runs made by this call
    left: int  # series that the time did not suffice for
    failures: tuple[str, ...]  # one line for each run that failed for another reason than memory


@dataclass(slots=True)
class _Progress:
    """What has happened so far in a call."""

    observations: list[Observation] = field(default_factory=list)
    limits: list[FoundLimit] = field(default_factory=list)
    new: int = 0
    left: int = 0
    failures: list[str] = field(default_factory=list)


class _TimeIsUpError(Exception):
    """The next run would not end in time."""


def run_campaign(campaign: Iterable[Series], lab: Lab) -> Harvest:
    """Make the runs that are still missing. A job that fails is told and left out, the others go on.

    Raises DataFileError where a run cannot be written or a file in the folder is broken, NoGpuError where
    the GPU goes away.
    """
    progress = _Progress()
    for series in campaign:
        try:
            if series.caps_bytes:
                for cap_bytes in series.caps_bytes:
                    _seek_limit(series, cap_bytes, lab, progress)
            else:
                for batch in series.batches:
                    progress.observations.append(_obtain(_request(series, batch), lab, progress))
        except _TimeIsUpError:
            progress.left += 1
        except (ModelError, UsageError) as error:
            progress.failures.append(str(error))
            lab.tell(f"left out: {error}")
    return Harvest(
        tuple(progress.observations),
        tuple(progress.limits),
        progress.new,
        progress.left,
        tuple(progress.failures),
    )


def _request(series: Series, batch: int, cap_bytes: int | None = None) -> ProbeRequest:
    # Whether a history is wanted is no part of what names the run's file: the path is filled in later.
    keep = Path() if batch in series.histories and cap_bytes is None else None
    return ProbeRequest(series.job, batch, cap_bytes, series.alloc_conf, keep)


def _obtain(request: ProbeRequest, lab: Lab, progress: _Progress) -> Observation:
    """The run from its file, or made now."""
    path = observation_path(lab.folder, request, lab.gpu)
    if path.exists():
        return load_observation(path)
    left = lab.seconds_left()
    if left < SHORTEST_PROBE_SECONDS:
        raise _TimeIsUpError
    if request.history is not None:
        lab.folder.mkdir(parents=True, exist_ok=True)
        request = replace(request, history=history_path(path))
    try:
        observation = lab.measure(request, min(left, LONGEST_PROBE_SECONDS))
    except ModelError:
        if lab.seconds_left() <= 0:  # it was stopped by the end of the time, which is no failure
            raise _TimeIsUpError from None
        raise
    save_observation(observation, path)
    progress.new += 1
    lab.tell(told(observation))
    return observation


def _seek_limit(series: Series, cap_bytes: int, lab: Lab, progress: _Progress) -> None:
    total = lab.gpu.versions.torch_total_bytes
    if total is not None and cap_bytes >= total:
        lab.tell(f"{series.job.model}: a cap of {cap_bytes // MIB:,} MiB is more than this GPU has; left out")
        return

    def obtain(batch: int) -> Observation:
        observation = _obtain(_request(series, batch, cap_bytes), lab, progress)
        if observation not in progress.observations:
            progress.observations.append(observation)
        return observation

    known = [one for one in progress.observations if _is_of(one, series)]
    guess = guess_limit(known, cap_bytes)
    if guess is None:
        guess = guess_limit(map(obtain, series.batches), cap_bytes) or min(series.batches)
    limit = find_limit(lambda batch: not obtain(batch).oom, guess, lambda: True)
    progress.limits.append(FoundLimit(series.job, cap_bytes, limit))
    exact = f"{limit.largest:,}" if limit.is_exact else f"at least {limit.largest:,}"
    lab.tell(f"{series.job.model} under {cap_bytes // MIB:,} MiB: the largest batch is {exact}")


def _is_of(observation: Observation, series: Series) -> bool:
    settings = observation.settings
    same = settings.alloc_conf == series.alloc_conf and observation.job == series.job
    return same and settings.allocator_cap_bytes is None


def told(observation: Observation) -> str:
    """One line about a run."""
    cap = observation.settings.allocator_cap_bytes
    under = "" if cap is None else f" under {cap // MIB:,} MiB"
    name = f"{observation.job.model} batch {observation.batch:,}{under}"
    if observation.oom:
        return f"{name}: out of memory"
    figures = (
        ("allocated", observation.peak_allocated_bytes),
        ("reserved", observation.peak_reserved_bytes),
        ("process", observation.process_peak_bytes),
    )
    seen = [f"{what} {size_bytes / MIB:,.0f} MiB" for what, size_bytes in figures if size_bytes is not None]
    return f"{name}: {', '.join(seen) or 'nothing measured'}"
