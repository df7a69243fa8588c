"""What a calibration is, and which of the stored ones answers for a job on a card.

`measured peak = overhead + slope * replayed peak reserved`, fitted over several batch sizes of one job on one
GPU. The files are read by `calibration_file` and made by the package `calibration`, which nothing here knows.

Look-up falls back level by level. The whole line carries over only to the same job; what carries over to
another job is the CUDA context, because workspaces and the allocator's rounding belong to the job. None
stands for the defaults: no calibration says anything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import hypot, sqrt
from statistics import median, stdev

from planner.hardware.calibration.observation import Observation, Origin, Settings, Versions
from planner.hardware.context import SPREAD_MIB
from planner.hardware.database import device_key
from planner.hardware.device import MIB, Device, FigureKind, SourcedBytes
from planner.jobs import Job

# Deviation of the contexts that others published for several cards, drivers and versions around
# their line. It widens every answer that comes from other versions or another card.
CONTEXT_DRIFT_BYTES = SPREAD_MIB * MIB
SAME_MEMORY = 0.05  # two cards of one name are one card if their memory agrees within this share


class Level(StrEnum):
    """How near the calibration that answers is to what was asked; the nearest first."""

    EXACT = "exact"  # same job, GPU and versions
    SAME_GPU = "same GPU"  # same job on it under other versions; or the context of other jobs on it
    SAME_ARCHITECTURE = "same architecture"  # the same of another GPU with the same major capability


@dataclass(frozen=True, slots=True)
class Point:
    """A run and what the replay said of it before."""

    observation: Observation
    replayed_bytes: int  # peak reserved of the replay without a limit


@dataclass(frozen=True, slots=True)
class Fit:
    """The line through the points, and how far they lie from it."""

    overhead_bytes: int
    slope: float
    spread_bytes: (
        int  # one standard deviation: the residuals' and, as two more of them, what runs have usually
    )
    points: int
    center_bytes: int  # mean of the replayed peaks
    width_bytes: int  # root of the sum of their squared distances from the mean
    highest_leverage: float  # of any one point: 1 means that the line hangs on it
    outliers: tuple[int, ...]  # batch sizes more than three spreads off the line

    def peak_bytes(self, replayed_bytes: int) -> int:
        """The peak that would be measured."""
        return round(self.overhead_bytes + self.slope * replayed_bytes)

    def leverage(self, replayed_bytes: int) -> float:
        """How far beyond the fitted points a replayed peak lies: 1 / points in their middle, and rising."""
        return 1 / self.points + ((replayed_bytes - self.center_bytes) / self.width_bytes) ** 2

    def bound_bytes(self, replayed_bytes: int, confidence: float) -> int:
        """The one-sided upper prediction bound by Student's t, spread and leverage."""
        from scipy.special import stdtrit  # 60 ms, paid only by those who have a calibration

        deviations = float(
            stdtrit(self.points, confidence)
        )  # less two for the line, and two more in the spread
        margin = deviations * self.spread_bytes * sqrt(1 + self.leverage(replayed_bytes))
        return self.peak_bytes(replayed_bytes) + round(margin)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the points support no line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Key:
    """What a calibration holds for; one file per key."""

    job: Job
    gpu: str
    versions: Versions
    settings: Settings


@dataclass(frozen=True, slots=True)
class Calibration:
    """The runs of one job on one GPU and the line through them."""

    key: Key
    source: Origin
    about: str  # where the figures come from, one sentence
    when: str  # the day of the last run, ISO 8601
    traced_with: str  # the version of torch under which the replayed peaks were traced
    includes_context: bool  # whether the overhead holds the CUDA context, or only what lies on top of it
    points: tuple[Point, ...]
    fit: Fit | Refusal

    @property
    def contexts(self) -> list[int]:
        """The context after the third step of each run that tells, in bytes; emulated ones tell none."""
        if self.source == "emulated":
            return []
        seen = (point.observation.context_after_bytes for point in self.points)
        return [size_bytes for size_bytes in seen if size_bytes is not None]


@dataclass(frozen=True, slots=True)
class Correction:
    """What the stored calibrations say about a job on a card."""

    level: Level
    about: str  # which calibration answers, for people
    source: Origin
    context: SourcedBytes | None  # in place of the card's own where calibrations tell it
    fit: Fit | None  # None where only the context carries over
    includes_context: bool  # whether the fit's overhead holds the context
    drift_bytes: int  # uncertainty on top of the fit's: other versions, another card; one deviation


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for; versions that the user does not know are None and count as the same."""

    job: Job
    device: Device
    torch: str | None = None
    alloc_conf: str = ""


def measured_bytes(observation: Observation, with_context: bool) -> int | None:
    """The peak that is fitted: the process's, or its rise over the level before the first tensor."""
    return observation.process_peak_bytes if with_context else observation.rise_bytes


def is_whole(observation: Observation) -> bool:
    """Whether nothing bounded the run, so that its peak is its own."""
    return (
        not observation.oom and not observation.retries and observation.settings.allocator_cap_bytes is None
    )


def look_up(stored: Sequence[Calibration], wanted: Wanted) -> Correction | None:
    """The nearest calibration, with what it says; None where the defaults have to do.

    Of equally near ones the first in `stored` answers, so folders that come first on the search path win. An
    emulated calibration answers only where none that was measured has a line, and only for its own card.
    """
    found = _look_up([known for known in stored if known.source != "emulated"], wanted)
    if found is not None and found.fit is not None:
        return found
    emulated = [
        known
        for known in stored
        if known.source == "emulated"
        and _same_settings(known.key, wanted)
        and is_card(wanted.device, known.key.gpu, known.key.versions)
    ]
    return _of_job(emulated, wanted) or found


def _of_job(here: Sequence[Calibration], wanted: Wanted) -> Correction | None:
    """Return what the calibrations of a card say of a job by a line of its own."""
    mine = [known for known in here if _same_replay(known.key.job, wanted.job)]
    exact = [known for known in mine if _same_torch(known.key.versions.torch, wanted.torch)]
    return _by_fit(Level.EXACT, exact) or _by_fit(Level.SAME_GPU, mine)


def _look_up(stored: Sequence[Calibration], wanted: Wanted) -> Correction | None:
    usable = [known for known in stored if _same_settings(known.key, wanted)]
    here = [known for known in usable if is_card(wanted.device, known.key.gpu, known.key.versions)]
    fitted = _of_job(here, wanted)
    if fitted is not None:
        return fitted
    context = _by_context(Level.SAME_GPU, here)
    if context is not None or wanted.device.capability_source.startswith("assumed"):
        return context
    major = wanted.device.capability[0]
    near = [known for known in usable if known.key.versions.capability[0] == major and known not in here]
    mine = [known for known in near if _same_replay(known.key.job, wanted.job)]
    return _by_fit(Level.SAME_ARCHITECTURE, mine) or _by_context(Level.SAME_ARCHITECTURE, near)


def find_run(stored: Iterable[Calibration], wanted: Wanted, batch: int) -> Observation | None:
    """A measured run of this very job at this batch size on this card that nothing bounded, with all its
    peaks.
    """
    for known in stored:
        if known.source == "emulated":
            continue
        same = _same_settings(known.key, wanted) and _same_job(known.key.job, wanted.job)
        if same and is_card(wanted.device, known.key.gpu, known.key.versions):
            for point in known.points:
                run = point.observation
                if run.batch == batch and is_whole(run) and run.peak_allocated_bytes is not None:
                    return run
    return None


def is_card(device: Device, gpu: str, versions: Versions) -> bool:
    """Whether `gpu`, as torch, nvidia-smi or the device database calls it, is this card."""
    if device_key(gpu) not in map(device_key, (device.name, *device.aliases)):
        return False
    totals = (
        (versions.nvml_total_bytes, device.total.value),
        (versions.torch_total_bytes, device.usable.value),
    )
    return all(abs(seen - known) <= SAME_MEMORY * known for seen, known in totals if seen is not None)


def label(calibration: Calibration) -> str:
    """A calibration in a few words."""
    key = calibration.key
    model = key.job.source or key.job.model
    return f"{model} with {key.job.optimizer} on {key.gpu}, torch {key.versions.torch}, {calibration.source}"


def _by_fit(level: Level, found: Iterable[Calibration]) -> Correction | None:
    """What the first that has a line says."""
    for known in found:
        if isinstance(known.fit, Fit):
            inside = known.includes_context
            context = _context(known.contexts, label(known)) if inside else None
            # Without a context in the fit, the card's own is added, whose deviation holds the versions.
            moved = level is Level.SAME_ARCHITECTURE or (inside and level is Level.SAME_GPU)
            drift = CONTEXT_DRIFT_BYTES if moved else 0
            return Correction(level, label(known), known.source, context, known.fit, inside, drift)
    return None


def _by_context(level: Level, known: Iterable[Calibration]) -> Correction | None:
    """What carries over from other jobs: the median context of all their runs."""
    telling = [calibration for calibration in known if calibration.contexts]
    if not telling:
        return None
    sizes = [size for calibration in telling for size in calibration.contexts]
    drift = CONTEXT_DRIFT_BYTES if level is Level.SAME_ARCHITECTURE else 0
    about = f"the context of {len(sizes)} runs of other jobs, such as {label(telling[0])}"
    return Correction(
        level, about, telling[0].source, _context(sizes, about, drift), None, True, drift_bytes=drift
    )


def _context(sizes: Sequence[int], source: str, drift_bytes: int = 0) -> SourcedBytes | None:
    if not sizes:
        return None
    spread = stdev(sizes) if len(sizes) > 1 else CONTEXT_DRIFT_BYTES
    return SourcedBytes(
        round(median(sizes)), f"measured: {source}", round(hypot(spread, drift_bytes)), FigureKind.MEASURED
    )


def _same_job(one: Job, other: Job) -> bool:
    """Whether two jobs take the same memory in a step: names do not count, nor how many steps there are."""
    return _essence(one) == _essence(other)


def _same_replay(one: Job, other: Job) -> bool:
    """Whether a line through the replays of one stands for the other: the workspaces have to be the same."""
    return one.cudnn == other.cudnn and _same_job(one, other)


def _essence(job: Job) -> tuple[object, ...]:
    unnamed = replace(job, model=job.source or job.model, source="", model_args=(), steps=1)
    unnamed = replace(unnamed, dataset_size=0, cudnn="", lengths=None)
    return unnamed, sorted(map(repr, job.model_args))


def _same_settings(key: Key, wanted: Wanted) -> bool:
    """Whether runs had PyTorch's defaults, save the allocator's options, which are those asked for.

    With cuDNN's benchmark mode even the context may be another one, since it loads the kernels of all plans
    that it times (inferred).
    """
    same_mode = key.job.cudnn_benchmark == wanted.job.cudnn_benchmark
    return same_mode and key.settings == Settings(alloc_conf=wanted.alloc_conf)


def _same_torch(seen: str, wanted: str | None) -> bool:
    """Whether two versions differ in patch level and build at most."""
    return wanted is None or seen.split("+")[0].split(".")[:2] == wanted.split("+")[0].split(".")[:2]
