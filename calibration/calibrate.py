"""`planner calibrate` and `planner verify` without their printing: measure, replay, fit, keep; hold against.

Raw runs go to `runs/` in the folder, calibrations beside it. All that measures raises NoGpuError without one.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from math import ceil
from pathlib import Path
from time import monotonic

from calibration.campaign import Harvest, Lab, run_campaign
from calibration.campaign_file import STANDARD, Series, load_campaign
from calibration.observation_file import path_of, save_observation
from calibration.probe.client import find_gpu, measure
from calibration.probe.request import ProbeRequest
from calibration.record import Origins, add_points, key_of
from calibration.records.reader import read_measured_records
from planner.allocator import UNLIMITED, parse_alloc_conf, replay_trace, rules_of_torch
from planner.allocator.history import save_history
from planner.errors import ModelError, UsageError
from planner.hardware import find_device
from planner.hardware.calibration import Calibration, Key, Observation, Point, fit_points, origin_of
from planner.jobs import SOURCES, Job, load_catalogue
from planner.planning import Estimate, OnProgress, Plan, TraceSource, trace_workload
from planner.program import Outcome, Target

RUNS = "runs"
LONGEST_RUN_SECONDS = 600.0

OpenTracer = Callable[[Job, Target, OnProgress], TraceSource]


@dataclass(frozen=True, slots=True)
class Imported:
    """What was taken over from a folder of records."""

    calibrations: tuple[Calibration, ...]
    failures: tuple[str, ...]  # jobs that ran but could not be traced
    set_aside: tuple[str, ...]  # records that no job can say yet, one line each


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a call measured and what is known now."""

    harvest: Harvest
    calibrations: tuple[Calibration, ...]  # of every job that was asked for and has runs, with fit or refusal
    failures: tuple[str, ...]  # jobs that ran but could not be traced


def calibrate(
    job: Job, batches: Sequence[int], out_dir: Path, minutes: float, tell: OnProgress, alloc_conf: str = ""
) -> Calibrated:
    """Measure a job at these batch sizes, fit, and keep runs and calibration in the folder.

    Runs that the folder has already are not made again; those that the time does not suffice for are made
    by the next call. `alloc_conf` is the text of PYTORCH_ALLOC_CONF; raises UsageError where it is broken.
    """
    if not batches or min(batches) < 1:
        raise UsageError("--batches: give positive batch sizes, such as 16,32,64,128")
    parse_alloc_conf(alloc_conf)
    return calibrate_series([Series(job, tuple(batches), alloc_conf=alloc_conf)], out_dir, minutes, tell)


def calibrate_campaign(
    out_dir: Path, minutes: float, tell: OnProgress, path: Path = STANDARD, sources: Collection[str] = SOURCES
) -> Calibrated:
    """Run a campaign file, by default the one that ships, as far as the time goes; see `calibrate`.

    Its models come from these sources.
    """
    series, about = load_campaign(load_catalogue(), path, sources)
    tell(about)
    return calibrate_series(series, out_dir, minutes, tell)


def calibrate_series(
    campaign: Sequence[Series], out_dir: Path, minutes: float, tell: OnProgress
) -> Calibrated:
    """What `calibrate` and `calibrate_campaign` share. `minutes` bounds the measuring."""
    if not 0 < minutes <= 10**6:
        raise UsageError(f"--minutes {minutes}: give the minutes that measuring may take, such as 10")
    gpu = find_gpu()
    tell(f"running on {gpu.name} with torch {gpu.versions.torch}")
    end = monotonic() + 60 * minutes
    lab = Lab(gpu, out_dir / RUNS, measure, lambda: end - monotonic(), tell)
    harvest = run_campaign(campaign, lab)
    calibrations, failures = keep_observations(_without_cap(harvest.observations), out_dir, tell)
    return Calibrated(harvest, calibrations, failures)


def import_records(folder: Path, out_dir: Path, tell: OnProgress) -> Imported:
    """Take over a folder of the self-contained measuring script: runs, histories, calibrations; needs no GPU.

    A run that is there already stays as it is; runs on emulated GPUs stay emulated. Raises DataFileError.
    """
    records = read_measured_records(folder)
    for observation in records.observations:
        path = path_of(observation, out_dir / RUNS)
        if not path.exists():
            save_observation(observation, path)
    for record in records.histories:
        digest = sha256(repr(record).encode()).hexdigest()[:16]
        save_history(record.history, out_dir / RUNS / f"b{record.batch}-{digest}.history.json.gz")
    aside = tuple(f"{one.file} line {one.line}: {one.reason}" for one in records.set_aside)
    for line in aside:
        tell(f"set aside: {line}")
    calibrations, failures = keep_observations(_without_cap(records.observations), out_dir, tell)
    return Imported(calibrations, failures, aside)


def keep_observations(
    observations: Iterable[Observation],
    out_dir: Path,
    tell: OnProgress,
    open_tracer: OpenTracer | None = None,
) -> tuple[tuple[Calibration, ...], tuple[str, ...]]:
    """Replay each run's job, fit, and put both into the calibrations of the folder; needs no GPU.

    Gives the calibrations, and one line for each job that cannot be traced.
    """
    groups: dict[Key, list[Observation]] = {}
    for observation in observations:
        groups.setdefault(key_of(observation), []).append(observation)
    found, failures = [], []
    for key, group in groups.items():
        try:
            points = _replayed(key, group, tell, open_tracer or _tracer)
        except ModelError as error:
            failures.append(str(error))
            continue
        origins = Origins(origin_of(key.gpu), "", version("torch"))
        found.append(add_points(out_dir, key, points, origins, fit_points))
    return tuple(found), tuple(failures)


def _without_cap(observations: Iterable[Observation]) -> list[Observation]:
    """What ran under a cap tells limits and no line; it stays in its own files."""
    return [one for one in observations if one.settings.allocator_cap_bytes is None]


def _tracer(job: Job, chip: Target, tell: OnProgress) -> TraceSource:
    return trace_workload(job, None, None, chip).open(tell)


def _chip(key: Key) -> Target:
    """The card's, where the database knows it."""
    try:
        known = find_device(key.gpu).target
    except UsageError:
        return Target.for_capability(key.versions.capability)
    return (
        known
        if known.capability == key.versions.capability
        else Target.for_capability(key.versions.capability)
    )


def _replayed(
    key: Key, observations: Sequence[Observation], tell: OnProgress, open_tracer: OpenTracer
) -> list[Point]:
    """Each run with the peak that the replay without a limit says."""
    tracer = open_tracer(key.job, _chip(key), tell)
    rules = parse_alloc_conf(key.settings.alloc_conf, rules_of_torch(key.versions.torch))
    arena = replace(UNLIMITED, rules=rules)
    peaks: dict[int, int] = {}
    for batch in sorted({observation.batch for observation in observations}):
        peaks[batch] = replay_trace(tracer(batch), batch, arena).peak_reserved_bytes
    return [Point(observation, peaks[observation.batch]) for observation in observations]


@dataclass(frozen=True, slots=True)
class Verification:
    """An estimate and the run of the same job at the same batch size."""

    estimate: Estimate
    observation: Observation

    @property
    def ran(self) -> bool:
        """Whether memory sufficed."""
        return not self.observation.oom

    @property
    def agrees(self) -> bool:
        """Whether it ran where the estimate said so and died where not.

        At a high confidence a batch may run that was said not to fit; that is the price of the confidence.
        """
        return self.ran == (self.estimate.outcome is not Outcome.DOES_NOT_FIT)

    @property
    def holds(self) -> bool:
        """Whether what was said with the confidence is so: a batch that fits runs, within the upper bound."""
        if self.estimate.outcome is Outcome.DOES_NOT_FIT:
            return True
        process = self.observation.process_peak_bytes
        return self.ran and (process is None or process <= self.estimate.process_upper_bytes)

    @property
    def errors(self) -> Mapping[str, float]:
        """Estimated over measured less 1 of each peak that was seen; empty where the run died."""
        run, seen = self.estimate.run, self.observation
        pairs = {
            "allocated": (run.peak_allocated_bytes, seen.peak_allocated_bytes),
            "reserved": (run.peak_reserved_bytes, seen.peak_reserved_bytes),
            "process": (self.estimate.process_bytes, seen.process_peak_bytes),
        }
        if not self.ran:
            return {}
        return {what: said / measured - 1 for what, (said, measured) in pairs.items() if measured}


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A largest batch held against runs: it, the next, and one beyond; those after a death are not made."""

    plan: Plan
    runs: tuple[Verification, ...]  # by rising batch size

    @property
    def holds(self) -> bool:
        """Whether every run holds; see `Verification.holds`."""
        return all(run.holds for run in self.runs)

    @property
    def lived(self) -> int:
        """The largest batch size that ran; 0: none did."""
        return max((run.observation.batch for run in self.runs if run.ran), default=0)

    @property
    def died(self) -> int | None:
        """The smallest batch size that ran out of memory; None: none did."""
        return min((run.observation.batch for run in self.runs if not run.ran), default=None)


BEYOND = 1.05  # of the largest batch: so far above it, a run is expected to die


def verify_limit(
    plan: Plan,
    estimate_at: Callable[[int], Estimate],
    alloc_conf: str,
    tell: OnProgress,
    probe: Callable[..., Observation] = measure,
) -> LimitCheck:
    """Run the largest batch of a plan and the next; under a cap on the allocator also 1.05 of the largest.

    Without a cap that third run would need memory that other processes on the card may leave or take.
    Raises as `verify`.
    """
    largest = plan.search.largest
    batches = {largest, largest + 1} if plan.first_failure is not None else {largest}
    if plan.budget.cap_bytes is not None:
        batches.add(ceil(BEYOND * largest))
    known = {found.run.batch: found for found in (plan.at_max, plan.first_failure) if found is not None}
    runs: list[Verification] = []
    for batch in sorted(batches - {0}):
        found = known.get(batch) or estimate_at(batch)
        tell(f"running batch {batch}")
        runs.append(verify(plan.job, batch, found, alloc_conf, probe))
        if not runs[-1].ran:
            break
    return LimitCheck(plan, tuple(runs))


def verify(
    job: Job,
    batch: int,
    estimate: Estimate,
    alloc_conf: str = "",
    probe: Callable[..., Observation] = measure,
) -> Verification:
    """Run the batch on this machine's GPU, under the estimate's allocator cap if it has one.

    The run is kept nowhere. Raises NoGpuError without a GPU, ModelError where the steps fail.
    """
    if estimate.run.batch != batch or estimate.job != job:
        raise ValueError("the estimate is of another job or batch size")
    request = ProbeRequest(job, batch, estimate.budget.cap_bytes, alloc_conf)
    return Verification(estimate, probe(request, LONGEST_RUN_SECONDS))
