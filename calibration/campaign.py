"""Run a campaign: the probes that are still to be made, one after the other, until the time is up.

Each run is written as it comes. A later call with the same folder goes on where this one stopped.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from calibration.campaign_file import BatchSeries
from calibration.limits import Limit, find_limit, guess_limit
from calibration.observations import history_path, load_observation, run_path, save_observation
from calibration.probe.client import DetectedGpu, Measure, ProbeRequest
from planner.errors import ModelError, UsageError
from planner.hardware import MIB
from planner.hardware.calibration import Observation
from planner.jobs import Job
from planner.program import OnProgress

SHORTEST_PROBE_SECONDS = 15  # with less time left none is begun
LONGEST_PROBE_SECONDS = 600


class MeasurementSetup(Struct, frozen=True):
    """The GPU and the folder of a campaign's runs."""

    gpu: DetectedGpu
    folder: Path  # one file for each run
    measure: Measure
    seconds_left: Callable[[], float]
    on_progress: OnProgress  # hears one short line for each run


class FoundLimit(Struct, frozen=True):
    """The true largest batch of a job under an allocator cap."""

    job: Job
    cap_bytes: int
    limit: Limit


class CampaignResult(Struct):
    """The runs of a call, which grow while it goes on."""

    observations: list[Observation] = []  # in the campaign's order
    limits: list[FoundLimit] = []
    new: int = 0  # runs made by this call
    remaining: int = 0  # series that the time did not suffice for
    failures: list[str] = []  # one line for each run that failed for another reason than memory


class _TimeIsUpError(Exception):
    """The next run would not end in time."""


def run_campaign(campaign: Iterable[BatchSeries], setup: MeasurementSetup) -> CampaignResult:
    """Make the runs that are still missing. A job that fails is reported and left out, the others go on.

    Raises DataFileError where a run cannot be written or a file in the folder is broken, NoGpuError where
    the GPU goes away.
    """
    result = CampaignResult()
    for series in campaign:
        try:
            for cap_bytes in series.caps_bytes:
                _seek_limit(series, cap_bytes, setup, result)
            if not series.caps_bytes:
                for batch in series.batches:
                    result.observations.append(_obtain(_request(series, batch), setup, result))
        except _TimeIsUpError:
            result.remaining += 1
        except (ModelError, UsageError) as error:
            result.failures.append(str(error))
            setup.on_progress(f"left out: {error}")
    return result


def _request(series: BatchSeries, batch: int, cap_bytes: int | None = None) -> ProbeRequest:
    # The history is no part of the name of the run's file: its path is filled in later.
    keep = Path() if batch in series.histories and cap_bytes is None else None
    return ProbeRequest(series.job, batch, cap_bytes, series.alloc_conf, keep)


def _obtain(request: ProbeRequest, setup: MeasurementSetup, result: CampaignResult) -> Observation:
    """Return the run from its file, or make it now."""
    gpu, cap_bytes = setup.gpu, request.allocator_cap_bytes
    settings = replace(gpu.settings, alloc_conf=request.alloc_conf, allocator_cap_bytes=cap_bytes)
    path = run_path(setup.folder, request.job, request.batch, settings, gpu.name, gpu.versions.torch)
    if path.exists():
        return load_observation(path)
    left = setup.seconds_left()
    if left < SHORTEST_PROBE_SECONDS:
        raise _TimeIsUpError
    if request.history is not None:
        setup.folder.mkdir(parents=True, exist_ok=True)
        request = replace(request, history=history_path(path))
    try:
        observation = setup.measure(request, min(left, LONGEST_PROBE_SECONDS))
    except ModelError:
        if setup.seconds_left() <= 0:  # it was stopped by the end of the time, which is no failure
            raise _TimeIsUpError from None
        raise
    save_observation(observation, path)
    result.new += 1
    setup.on_progress(describe(observation))
    return observation


def _seek_limit(series: BatchSeries, cap_bytes: int, setup: MeasurementSetup, result: CampaignResult) -> None:
    total = setup.gpu.versions.torch_total_bytes
    if total is not None and cap_bytes >= total:
        cap = f"a cap of {cap_bytes // MIB:,} MiB is more than this GPU has"
        setup.on_progress(f"{series.job.model}: {cap}; left out")
        return

    def obtain(batch: int) -> Observation:
        observation = _obtain(_request(series, batch, cap_bytes), setup, result)
        if observation not in result.observations:
            result.observations.append(observation)
        return observation

    known = [one for one in result.observations if _is_of(one, series)]
    guess = guess_limit(known, cap_bytes)
    if guess is None:
        guess = guess_limit(map(obtain, series.batches), cap_bytes) or min(series.batches)
    limit = find_limit(lambda batch: not obtain(batch).oom, guess)
    result.limits.append(FoundLimit(series.job, cap_bytes, limit))
    exact = f"{limit.largest:,}" if limit.is_exact else f"at least {limit.largest:,}"
    setup.on_progress(f"{series.job.model} under {cap_bytes // MIB:,} MiB: the largest batch is {exact}")


def _is_of(observation: Observation, series: BatchSeries) -> bool:
    settings = observation.settings
    same = settings.alloc_conf == series.alloc_conf and observation.job == series.job
    return same and settings.allocator_cap_bytes is None


def describe(observation: Observation) -> str:
    """Return one line about a run."""
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
    known = [f"{what} {size_bytes / MIB:,.0f} MiB" for what, size_bytes in figures if size_bytes is not None]
    return f"{name}: {', '.join(known) or 'nothing measured'}"
