"""Make the runs of a campaign until the time is up.

Runs that are stored already are left out, and the others run one after the other. Each run is written as soon
as it ends. A later call with the same folder continues the campaign.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from calibration.campaign_file import BatchSeries
from calibration.observations import load_observation, run_path, save_observation
from calibration.probe.client import DetectedGpu, Measure, ProbeRequest
from planner.errors import ModelError, UsageError
from planner.hardware import MIB
from planner.hardware.calibration import Observation
from planner.jobs import Job
from planner.program import OnProgress

SHORTEST_PROBE_SECONDS = 15  # no probe is begun with less time left
LONGEST_PROBE_SECONDS = 600
LARGEST_BATCH = 2**20
FIRST_STEP_SHARE = 50  # the first step of a search for a limit is the guess divided by this number


class MeasurementSetup(Struct, frozen=True):
    """The GPU, folder, probe, time left and progress output of a campaign's runs."""

    gpu: DetectedGpu
    folder: Path  # one file for each run
    measure: Measure
    seconds_left: Callable[[], float]
    on_progress: OnProgress  # called with one short line for each run


class Limit(Struct, frozen=True):
    """Bounds of the largest batch size that runs."""

    largest: int  # the largest batch size that ran, or 0 if no batch ran
    first_oom: int | None  # the smallest batch size that ran out of memory, or None if no batch did

    @property
    def is_exact(self) -> bool:
        """Return whether the bounds differ by 1."""
        return self.first_oom is not None and self.first_oom - self.largest == 1


class FoundLimit(Struct, frozen=True):
    """Measured bounds of a job's largest batch under an allocator cap."""

    job: Job
    cap_bytes: int
    limit: Limit


class CampaignResult(Struct):
    """The observations, limits and failures of a campaign, filled in after each run."""

    observations: list[Observation] = []  # in the campaign's order
    limits: list[FoundLimit] = []
    new: int = 0  # runs made by this call
    remaining: int = 0  # series for which the time did not suffice
    failures: list[str] = []  # one line for each series that an error other than lack of memory ended


class _TimeIsUpError(Exception):
    """Error that ends a series if too little time is left for the next run."""


def run_campaign(campaign: Iterable[BatchSeries], setup: MeasurementSetup) -> CampaignResult:
    """Make the missing runs of a campaign, and return all runs with the failures.

    Runs that are stored already are not repeated. The result also has the limits under allocator caps. A
    series that fails is reported, and the rest of its runs is left out. Raises DataFileError if a run cannot
    be written or a file in the folder is broken, NoGpuError if the GPU is lost.
    """
    result = CampaignResult()
    for series in campaign:
        try:
            for cap_bytes in series.caps_bytes:
                _seek_limit(series, cap_bytes, setup, result)
            if not series.caps_bytes:
                for batch in series.batches:
                    result.observations.append(_obtain(series, batch, None, setup, result))
        except _TimeIsUpError:
            result.remaining += 1
        except (ModelError, UsageError) as error:
            result.failures.append(str(error))
            setup.on_progress(f"left out: {error}")
    return result


def _obtain(
    series: BatchSeries, batch: int, cap_bytes: int | None, setup: MeasurementSetup, result: CampaignResult
) -> Observation:
    """Load the observation of a run, or measure and save it if none is stored.

    Raises _TimeIsUpError if too little time is left to measure the run.
    """
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
        if setup.seconds_left() <= 0:  # the end of the time stopped the run, which is no failure
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
        setup.on_progress(f"{series.job.model.name}: {cap}; left out")
        return

    def obtain(batch: int) -> Observation:
        observation = _obtain(series, batch, cap_bytes, setup, result)
        if observation not in result.observations:
            result.observations.append(observation)
        return observation

    settings = replace(setup.gpu.settings, alloc_conf=series.alloc_conf)
    earlier = [one for one in result.observations if (one.job, one.settings) == (series.job, settings)]
    guess = guess_limit(earlier, cap_bytes)
    if guess is None:
        guess = guess_limit(map(obtain, series.batches), cap_bytes) or min(series.batches)
    limit = find_limit(lambda batch: not obtain(batch).oom, guess)
    result.limits.append(FoundLimit(series.job, cap_bytes, limit))
    exact = f"{limit.largest:,}" if limit.is_exact else f"at least {limit.largest:,}"
    setup.on_progress(f"{series.job.model.name} under {cap_bytes // MIB:,} MiB: the largest batch is {exact}")


def describe(run: Observation) -> str:
    """Return one line on a run: model, batch size, cap, and its peaks or that memory ran out."""
    cap = run.settings.allocator_cap_bytes
    under = "" if cap is None else f" under {cap // MIB:,} MiB"
    name = f"{run.job.model.name} batch {run.batch:,}{under}"
    if run.oom:
        return f"{name}: out of memory"
    sizes = (run.peak_allocated_bytes, run.peak_reserved_bytes, run.process_peak_bytes)
    figures = zip(("allocated", "reserved", "process"), sizes, strict=True)
    parts = [f"{what} {size_bytes / MIB:,.0f} MiB" for what, size_bytes in figures if size_bytes is not None]
    return f"{name}: {', '.join(parts) or 'nothing measured'}"


def find_limit(lives: Callable[[int], bool], guess: int) -> Limit:
    """Search for the largest batch that runs, and return its bounds.

    They are found by doubling steps from `guess`, then by bisection. `lives` runs a batch and returns whether
    it fit. The bounds are exact unless `LARGEST_BATCH` runs. Probes cost seconds, so no neighbours of the
    boundary are run, unlike in `planner.planning.search`.
    """
    limit = Limit(0, None)
    batch = min(max(guess, 1), LARGEST_BATCH)
    step = max(1, guess // FIRST_STEP_SHARE)
    while not limit.is_exact and limit.largest < LARGEST_BATCH:
        limit = Limit(batch, limit.first_oom) if lives(batch) else Limit(limit.largest, batch)
        if limit.first_oom is None:
            batch = min(limit.largest + step, LARGEST_BATCH)
        elif limit.largest == 0:
            batch = max(limit.first_oom - step, 1)
        else:
            batch = (limit.largest + limit.first_oom) // 2
        step *= 2
    return limit


def guess_limit(observations: Iterable[Observation], cap_bytes: int) -> int | None:
    """Return a guess of the largest batch that fits under the cap, or None if the runs show no growth.

    It is the batch size at which a line through the runs' allocated peaks reaches the cap. The line goes
    through the smallest and the largest batch that did not run out of memory. Returns None if there are fewer
    than two such batch sizes, or if the peak does not grow between the two. The result is only a guess: the
    allocator rounds, and a run near the cap may fit by releasing cached memory.
    """
    peaks = {
        observation.batch: observation.peak_allocated_bytes
        for observation in observations
        if not observation.oom and observation.peak_allocated_bytes is not None
    }
    if len(peaks) < 2:
        return None
    first, last = min(peaks), max(peaks)
    slope = (peaks[last] - peaks[first]) / (last - first)
    if slope <= 0:
        return None
    return max(1, min(LARGEST_BATCH, int(last + (cap_bytes - peaks[last]) / slope)))
