"""Calibrate the planner with measured runs of jobs.

Jobs are measured and replayed, calibrations are fitted, and runs and calibrations are stored. Raw runs go to
`runs/` in a folder, calibrations to the folder itself. Measuring raises NoGpuError without a GPU.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from msgspec import Struct
from msgspec.structs import replace

from calibration.campaign import CampaignResult, MeasurementSetup, run_campaign
from calibration.campaign_file import STANDARD, BatchSeries, load_campaign
from calibration.observations import observation_path, save_observation
from calibration.probe.client import find_gpu, measure
from calibration.records.reader import read_measured_records
from calibration.trainings import RUNS
from planner.allocator import UNLIMITED, config_of_torch, parse_alloc_conf, replay_trace
from planner.allocator.history import save_history
from planner.emulator import default_source
from planner.errors import ModelError, UsageError
from planner.hardware import find_device
from planner.hardware.calibration import (
    Calibration,
    Key,
    Observation,
    Origins,
    Point,
    add_points,
    fit_points,
    key_of,
    origin_of,
)
from planner.jobs import SOURCES, Job, load_catalogue
from planner.planning import open_traces
from planner.program import OnProgress, Target, has_convolutions


class ImportResult(Struct, frozen=True):
    """The result of importing a measuring script's records: calibrations, failures and skipped records."""

    calibrations: tuple[Calibration, ...]
    failures: tuple[str, ...]  # one line for each job that cannot be traced or replayed
    skipped: tuple[str, ...]  # one line for each record with an unsupported job or a cut line


class CalibrationResult(Struct, frozen=True):
    """The result of measuring jobs: runs, calibrations and failures."""

    campaign: CampaignResult
    calibrations: tuple[Calibration, ...]  # of every job that has runs without a cap and can be replayed
    failures: tuple[str, ...]  # one line for each job that ran but cannot be traced or replayed


def calibrate(
    job: Job,
    batches: Sequence[int],
    out_dir: Path,
    minutes: float,
    on_progress: OnProgress,
    alloc_conf: str = "",
) -> CalibrationResult:
    """Measure a job at `batches`, and fit a calibration to the runs.

    Runs and calibration are stored in `out_dir`. A run that the folder already has is not repeated. A run for
    which `minutes` do not suffice is left to the next call. `alloc_conf` is the text of PYTORCH_ALLOC_CONF.
    Raises UsageError for an invalid argument.
    """
    if not batches or min(batches) < 1:
        raise UsageError("--batches: give positive batch sizes, such as 16,32,64,128")
    parse_alloc_conf(alloc_conf)
    series = [BatchSeries(job, tuple(batches), alloc_conf=alloc_conf)]
    return calibrate_series(series, out_dir, minutes, on_progress)


def calibrate_campaign(
    out_dir: Path,
    minutes: float,
    on_progress: OnProgress,
    path: Path = STANDARD,
    sources: Collection[str] = SOURCES,
) -> CalibrationResult:
    """Measure the jobs of a campaign file, and fit calibrations.

    Runs and calibrations are stored in `out_dir`. The models must be from `sources`.
    """
    series, about = load_campaign(load_catalogue(), path, sources)
    on_progress(about)
    return calibrate_series(series, out_dir, minutes, on_progress)


def calibrate_series(
    campaign: Sequence[BatchSeries], out_dir: Path, minutes: float, on_progress: OnProgress
) -> CalibrationResult:
    """Measure series of runs for at most `minutes`, then fit calibrations to these and to stored runs."""
    if not 0 < minutes <= 10**6:
        raise UsageError(f"--minutes {minutes}: give the minutes that measuring may take, such as 10")
    gpu = find_gpu()
    on_progress(f"running on {gpu.name} with torch {gpu.versions.torch}")
    end = monotonic() + 60 * minutes
    setup = MeasurementSetup(gpu, out_dir / RUNS, measure, lambda: end - monotonic(), on_progress)
    result = run_campaign(campaign, setup)
    calibrations, failures = keep_observations(result.observations, out_dir, on_progress)
    return CalibrationResult(result, calibrations, failures)


def import_records(folder: Path, out_dir: Path, on_progress: OnProgress) -> ImportResult:
    """Import the measuring script's records, and fit calibrations to them.

    The script wrote runs and histories to `folder`; they are stored in `out_dir`. No GPU is needed. A run
    that is stored already is not changed, and runs on emulated GPUs stay marked as emulated. Raises
    DataFileError for a broken record, or if a file cannot be written.
    """
    records = read_measured_records(folder)
    for observation in records.observations:
        path = observation_path(out_dir / RUNS, observation)
        if not path.exists():
            save_observation(observation, path)
    for record in records.histories:
        digest = sha256(repr(record).encode()).hexdigest()[:16]
        save_history(record.history, out_dir / RUNS / f"b{record.batch}-{digest}.history.json.gz")
    skipped = tuple(f"{one.file} line {one.line}: {one.reason}" for one in records.skipped)
    for line in skipped:
        on_progress(f"set aside: {line}")
    calibrations, failures = keep_observations(records.observations, out_dir, on_progress)
    return ImportResult(calibrations, failures, skipped)


def keep_observations(
    observations: Iterable[Observation], out_dir: Path, on_progress: OnProgress
) -> tuple[tuple[Calibration, ...], tuple[str, ...]]:
    """Add runs to the stored calibrations of their jobs, and return the refitted calibrations and failures.

    The calibrations are stored in `out_dir`. No GPU is needed. Runs under a cap are not added, since they
    show a limit instead of points on a line. A failure is one line for a job that cannot be traced or whose
    allocator is not simulated.
    """
    groups: dict[Key, list[Observation]] = {}
    for observation in observations:
        if observation.settings.allocator_cap_bytes is None:
            groups.setdefault(key_of(observation), []).append(observation)
    calibrations, failures = [], []
    for key, group in groups.items():
        try:
            points = _replayed(key, group, on_progress)
        except (ModelError, UsageError) as error:
            failures.append(str(error))
            continue
        origins = Origins(origin_of(key.gpu), "", version("torch"))
        stored_key = key_of(points[0].observation)
        calibrations.append(add_points(out_dir, stored_key, points, origins, fit_points))
    return tuple(calibrations), tuple(failures)


def _target(key: Key) -> Target:
    """Return the `Target` for tracing jobs on a calibration's GPU.

    The target is from the database of GPUs, else made for the compute capability. An entry of the database
    with a different compute capability is ignored.
    """
    capability = key.versions.capability
    with suppress(UsageError):
        target = find_device(key.gpu).target
        if target.capability == capability:
            return target
    return Target.for_capability(capability)


def _replayed(key: Key, observations: Sequence[Observation], on_progress: OnProgress) -> list[Point]:
    """Replay the runs in the simulator, and return a calibration point for each run.

    A point has the run and the reserved peak of its replay, which has no memory limit. If the model has
    convolutions, and its job does not name the source of their workspaces, the job in the points names this
    machine's default source.
    """
    source = cache(open_traces(key.job, _target(key), on_progress))
    config = parse_alloc_conf(key.settings.alloc_conf, config_of_torch(key.versions.torch))
    limits = replace(UNLIMITED, config=config)
    batches = sorted({observation.batch for observation in observations})
    peaks = {batch: replay_trace(source(batch), limits).peak_reserved_bytes for batch in batches}
    job = key.job
    if not job.environment.cudnn and has_convolutions(source(batches[0])):
        job = job.replace(cudnn=default_source(job))
    return [Point(replace(one, job=job), peaks[one.batch]) for one in observations]
