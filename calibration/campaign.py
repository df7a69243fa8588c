"""Run a campaign: the probes that are still to be made, one after the other, until the time is up.

Each run is written as it comes. A later call with the same folder goes on where this one stopped.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from calibration.campaign_file import BatchSeries
from calibration.limits import Limit, find_limit, guess_limit
from calibration.observations import load_observation, run_path, save_observation
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
                    result.observations.append(_obtain(series, batch, setup, result))
        except _TimeIsUpError:
            result.remaining += 1
        except (ModelError, UsageError) as error:
            result.failures.append(str(error))
            setup.on_progress(f"left out: {error}")
    return result


def _obtain(
    series: BatchSeries,
    batch: int,
    setup: MeasurementSetup,
    result: CampaignResult,
    cap_bytes: int | None = None,
) -> Observation:
    """Return the run from its file, or make it now."""
    gpu, alloc_conf = setup.gpu, series.alloc_conf
    settings = replace(gpu.settings, alloc_conf=alloc_conf, allocator_cap_bytes=cap_bytes)
    path = run_path(setup.folder, series.job, batch, settings, gpu.name, gpu.versions.torch)
    if path.exists():
        return load_observation(path)
    left = setup.seconds_left()
    if left < SHORTEST_PROBE_SECONDS:
        raise _TimeIsUpError
    history = None
    if batch in series.histories and cap_bytes is None:
        setup.folder.mkdir(parents=True, exist_ok=True)
        history = path.with_name(f"{path.stem}.history.json.gz")
    request = ProbeRequest(series.job, batch, cap_bytes, alloc_conf, history)
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
        observation = _obtain(series, batch, setup, result, cap_bytes)
        if observation not in result.observations:
            result.observations.append(observation)
        return observation

    settings = replace(setup.gpu.settings, alloc_conf=series.alloc_conf)
    known = [one for one in result.observations if (one.job, one.settings) == (series.job, settings)]
    guess = guess_limit(known, cap_bytes)
    if guess is None:
        guess = guess_limit(map(obtain, series.batches), cap_bytes) or min(series.batches)
    limit = find_limit(lambda batch: not obtain(batch).oom, guess)
    result.limits.append(FoundLimit(series.job, cap_bytes, limit))
    exact = f"{limit.largest:,}" if limit.is_exact else f"at least {limit.largest:,}"
    setup.on_progress(f"{series.job.model} under {cap_bytes // MIB:,} MiB: the largest batch is {exact}")


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
