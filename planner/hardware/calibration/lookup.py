"""Select the stored calibration that corrects the estimates for a job on a GPU.

The search falls back level by level. A whole line applies only to the same job. To another job only the CUDA
context applies, because workspaces and the allocator's rounding depend on the job.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import hypot
from statistics import median, stdev

from msgspec import Struct
from msgspec.structs import replace

from planner.hardware.calibration.model import Calibration, Fit, Key, Observation, Origin, Settings, Versions
from planner.hardware.context import SPREAD_MIB
from planner.hardware.database import device_key
from planner.hardware.device import MIB, Device, FigureKind, SourcedBytes
from planner.jobs import PUBLISHED, Job

# Deviation of published contexts for several GPUs, drivers and versions from their line. It widens every
# answer that comes from other versions or another GPU.
CONTEXT_SPREAD_BYTES = SPREAD_MIB * MIB
SAME_MEMORY = 0.05  # two GPUs of one name are one model if their memory agrees within this share


class MatchLevel(StrEnum):
    """The degrees to which a calibration matches a query, the closest match first."""

    EXACT = "exact"  # same job, GPU and versions
    SAME_GPU = "same GPU"  # same job and GPU under other versions; or the context of other jobs on the GPU
    SAME_ARCHITECTURE = "same architecture"  # likewise, on another GPU with the same major capability


class Correction(Struct, frozen=True):
    """What corrects estimates of a job on a GPU: a calibrated context, a fitted line, and an extra spread."""

    level: MatchLevel
    about: str  # a phrase that names the calibration
    source: Origin
    context: SourcedBytes | None  # replaces the GPU's context; None if the calibrations have no context
    fit: Fit | None  # None if only the context applies
    includes_context: bool  # whether the fit's overhead includes the context
    extra_spread_bytes: int  # uncertainty on top of the fit's: other versions, another GPU; one deviation


class CalibrationQuery(Struct, frozen=True):
    """A job on a GPU, with torch version and allocator settings, for which a calibration is searched.

    `torch` is None to match every version.
    """

    job: Job
    device: Device
    torch: str | None = None
    alloc_conf: str = ""


def find_calibration(stored: Sequence[Calibration], query: CalibrationQuery) -> Correction | None:
    """Return the correction from the closest calibration, or None if no calibration applies.

    Of equally close calibrations the first in `stored` is taken, so folders that come first on the search
    path win. A contributed calibration is taken only if no measured or published calibration has a fit, and
    its spread is widened. An emulated calibration is taken only if no other calibration has a fit, and only
    for the same GPU.
    """
    usable = [one for one in stored if _same_settings(one.key, query)]
    measured = _find([one for one in usable if one.source not in ("emulated", "contributed")], query)
    if measured is not None and measured.fit is not None:
        return measured
    contributed = _find([one for one in usable if one.source == "contributed"], query)
    if contributed is not None and (contributed.fit is not None or measured is None):
        measured = _contributed(contributed)
        if measured.fit is not None:
            return measured
    emulated = [one for one in usable if one.source == "emulated" and _is_on(one, query.device)]
    return _by_job(emulated, query) or measured


def _contributed(correction: Correction) -> Correction:
    """Return a correction marked as contributed, with at least the extra spread for other versions."""
    extra = max(correction.extra_spread_bytes, CONTEXT_SPREAD_BYTES)
    about = f"contributed by a user: {correction.about}"
    return replace(correction, about=about, extra_spread_bytes=extra)


def find_run(stored: Iterable[Calibration], query: CalibrationQuery, batch: int) -> Observation | None:
    """Return the first stored run of the query's job and GPU at `batch` with a usable peak, or None.

    The run is unconstrained, not emulated, and its allocated peak is known.
    """
    for one in stored:
        same = _same_settings(one.key, query) and is_same_job(one.key.job, query.job)
        if one.source != "emulated" and same and _is_on(one, query.device):
            for point in one.points:
                run = point.observation
                if run.batch == batch and run.is_unconstrained and run.peak_allocated_bytes is not None:
                    return run
    return None


def is_same_gpu(device: Device, gpu: str, versions: Versions) -> bool:
    """Return whether the GPU with the name `gpu` and the memory sizes in `versions` is `device`.

    The name is from torch, nvidia-smi or the device database. The memory sizes, if known, must agree with the
    device within 5 %.
    """
    if device_key(gpu) not in map(device_key, (device.name, *device.aliases)):
        return False
    totals = (
        (versions.nvml_total_bytes, device.total.value),
        (versions.torch_total_bytes, device.usable.value),
    )
    return all(abs(size - known) <= SAME_MEMORY * known for size, known in totals if size is not None)


def _is_on(calibration: Calibration, device: Device) -> bool:
    return is_same_gpu(device, calibration.key.gpu, calibration.key.versions)


def _find(usable: Sequence[Calibration], query: CalibrationQuery) -> Correction | None:
    here = [one for one in usable if _is_on(one, query.device)]
    fitted = _by_job(here, query)
    if fitted is not None:
        return fitted
    context = _by_context(MatchLevel.SAME_GPU, here)
    if context is not None or query.device.capability_source.startswith("assumed"):
        return context
    major = query.device.capability[0]
    near = [one for one in usable if one.key.versions.capability[0] == major and one not in here]
    same_job = [one for one in near if _same_replay(one.key.job, query.job)]
    return _by_fit(MatchLevel.SAME_ARCHITECTURE, same_job) or _by_context(MatchLevel.SAME_ARCHITECTURE, near)


def _by_job(here: Sequence[Calibration], query: CalibrationQuery) -> Correction | None:
    """Return the correction from a fitted line of the query's job, or None if there is none.

    A fit under the queried version of torch is preferred. All calibrations are of one GPU.
    """
    same_job = [one for one in here if _same_replay(one.key.job, query.job)]
    exact = [one for one in same_job if _same_torch(one.key.versions.torch, query.torch)]
    return _by_fit(MatchLevel.EXACT, exact) or _by_fit(MatchLevel.SAME_GPU, same_job)


def _by_fit(level: MatchLevel, calibrations: Iterable[Calibration]) -> Correction | None:
    """Return a correction from the first calibration with a fitted line, or None if none has a line."""
    for one in calibrations:
        if isinstance(one.fit, Fit):
            inside, about = one.includes_context, one.describe()
            context = _median_context(one.contexts, about) if inside else None
            # Without a context in the fit, the GPU's context is added, whose deviation covers other versions.
            moved = level is MatchLevel.SAME_ARCHITECTURE or (inside and level is MatchLevel.SAME_GPU)
            extra = CONTEXT_SPREAD_BYTES if moved else 0
            return Correction(level, about, one.source, context, one.fit, inside, extra)
    return None


def _by_context(level: MatchLevel, calibrations: Iterable[Calibration]) -> Correction | None:
    """Return a correction of the context alone, to the median of the known contexts, or None without any."""
    with_context = [one for one in calibrations if one.contexts]
    if not with_context:
        return None
    sizes = [size for one in with_context for size in one.contexts]
    extra = CONTEXT_SPREAD_BYTES if level is MatchLevel.SAME_ARCHITECTURE else 0
    about = f"the context of {len(sizes)} runs of other jobs, such as {with_context[0].describe()}"
    context = _median_context(sizes, about, extra)
    return Correction(level, about, with_context[0].source, context, None, True, extra)


def _median_context(sizes: Sequence[int], source: str, extra_bytes: int = 0) -> SourcedBytes | None:
    if not sizes:
        return None
    spread = hypot(stdev(sizes) if len(sizes) > 1 else CONTEXT_SPREAD_BYTES, extra_bytes)
    return SourcedBytes(round(median(sizes)), f"measured: {source}", round(spread), FigureKind.MEASURED)


def is_same_job(one: Job, other: Job) -> bool:
    """Return whether two jobs are equal in everything that affects the memory of a step.

    The model's name in the catalogue, the number of steps, the dataset's size, `lengths` and the source of
    cuDNN's workspaces are ignored.
    """
    return _memory_relevant(one) == _memory_relevant(other)


def _same_replay(one: Job, other: Job) -> bool:
    """Return whether a line fitted to job `one` applies to job `other`.

    It does not apply if published runs gave the workspaces of convolutions for only one job. Jobs without
    convolutions have no `cudnn`.
    """
    ours, others = one.environment.cudnn, other.environment.cudnn
    agree = not ours or (ours == PUBLISHED) is (others == PUBLISHED)
    return agree and is_same_job(one, other)


def _memory_relevant(job: Job) -> tuple[Job, list[str]]:
    source = job.model.origin
    nameless = job.replace(
        model=source, source="", model_args=(), steps=1, dataset_size=0, cudnn="", lengths=None
    )
    return nameless, sorted(map(repr, job.model.args))


def _same_settings(key: Key, query: CalibrationQuery) -> bool:
    """Return whether a calibration has the query's allocator options and otherwise default settings.

    The benchmark mode of cuDNN must be equal too: with it even the context may differ, since it loads the
    kernels of all plans that it times (inferred).
    """
    same_mode = key.job.environment.cudnn_benchmark == query.job.environment.cudnn_benchmark
    return same_mode and key.settings == Settings(alloc_conf=query.alloc_conf)


def _same_torch(version: str, queried: str | None) -> bool:
    """Return whether two versions of torch have equal major and minor numbers; None matches every version."""
    return queried is None or version.split("+")[0].split(".")[:2] == queried.split("+")[0].split(".")[:2]
