"""Compare the estimates of a job by all estimators with the measured memory, if there is any."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from planner.allocator import TimelineRecorder, replay_trace
from planner.hardware import Budget
from planner.hardware.calibration import Observation
from planner.jobs import Job
from planner.planning.estimate import Estimate
from planner.planning.estimators.methods import TITLES, Method
from planner.planning.estimators.published import PEAK_ALLOCATED, RESERVED, Archive, Source
from planner.planning.estimators.static_estimate import StaticEstimate
from planner.program import Category, Outcome, Trace

ALLOCATED, PROCESS = "allocated", "process"

# The terms that each figure sums up.
COUNTS = {
    Method.FORMULA: "batch, weights, outputs of layers not in place, and a gradient for each of them at once",
    Method.TORCHINFO: "batch, weights of leaves and twice their outputs; leaves without weights not at all",
    Method.TORCHSUMMARY: "batch, weights, twice the outputs of all modules, blocks and in-place ones too",
    Method.MODELSIZE: "batch, weights of the last module, twice the outputs of a chain of modules",
    Method.MEMTRACKER: "tensors alive at the peak of the loop, by the CPU's kernels; no workspaces",
    ALLOCATED: "tensors alive at the peak of the loop, by CUDA's kernels, and cuBLAS's workspaces",
    RESERVED: "the segments that the caching allocator holds for them",
    PROCESS: "reserved and CUDA context: what nvidia-smi shows",
}
NAMES: dict[str, str] = {
    **{method: title.removeprefix("the ") for method, title in TITLES.items()},
    ALLOCATED: "planner, allocated",
    RESERVED: "planner, reserved",
    PROCESS: "planner, process",
}


class ResidentModel(Struct, frozen=True):
    """An earlier model that stayed on the GPU while the measurement ran."""

    model: str
    size_bytes: int  # see `resident_bytes_after`


class Measured(Struct, frozen=True):
    """The measured peaks of a run, with the memory that earlier models held.

    For a stored run of a calibration, all peaks are known, including the peak of the process. For the
    published runs of the seeds only the figures that torch printed are known: the allocated peak, and the
    reserved memory at the end.
    """

    printed_bytes: float  # peak allocated
    reserved_bytes: float | None  # at the end; the peak of a stored run
    residents: tuple[ResidentModel, ...]
    source: Source
    process_bytes: int | None = None  # the peak that NVML showed

    @property
    def resident_bytes(self) -> int:
        """Return the total bytes of earlier models that stayed on the GPU."""
        return sum(resident.size_bytes for resident in self.residents)

    @property
    def allocated_bytes(self) -> float:
        """Return the measured allocated peak minus the bytes of earlier models."""
        return self.printed_bytes - self.resident_bytes

    @property
    def own_reserved_bytes(self) -> float | None:
        """Return the measured reserved memory minus the bytes of earlier models, or None if it is unknown.

        The bytes of earlier models are their tensors. The result includes the rest of their segments.
        """
        return None if self.reserved_bytes is None else self.reserved_bytes - self.resident_bytes


class Row(Struct, frozen=True):
    """One estimator's figure for a job, and the figure to compare it with."""

    key: str  # a `Method`, or "allocated", "reserved", "process" of this planner
    size_bytes: int | None
    reason: str | None  # why there is no figure
    yardstick_bytes: float | None  # the figure to compare with
    fits: Outcome | None  # the outcome on the GPU; None if there is no GPU or no figure

    @property
    def error(self) -> float | None:
        """Return the signed error relative to `yardstick_bytes`, or None if a figure is missing."""
        if self.size_bytes is None or not self.yardstick_bytes:
            return None
        return self.size_bytes / self.yardstick_bytes - 1


class Comparison(Struct, frozen=True):
    """The estimates of a job at one batch size by all estimators, with the measured memory if known."""

    job: Job
    batch: int
    budget: Budget
    rows: tuple[Row, ...]
    measured: Measured | None
    unmeasured: str | None  # why there is no measured value, so that errors are against `planner, allocated`
    seconds: float


def compare(
    estimate: Estimate,
    answers: Mapping[Method, StaticEstimate | str],
    measured: Measured | str,
    seconds: float,
) -> Comparison:
    """Compare the planner's estimate and the other estimators' answers with the measured memory.

    An answer, or `measured`, is a text that gives the reason if there is no figure. If nothing was measured,
    the other estimators' answers are compared with the planner's allocated peak.
    """
    run, record = estimate.run, measured if isinstance(measured, Measured) else None
    budget = estimate.budget
    bounded = budget.limits.allocator_limit_bytes is not None
    allocated: float = record.allocated_bytes if record else run.peak_allocated_bytes

    def of_peer(method: Method, answer: StaticEstimate | str) -> Row:
        if isinstance(answer, str):
            return Row(method, None, answer, None, None)
        verdict = Outcome.FITS if answer.fits else Outcome.DOES_NOT_FIT
        return Row(method, answer.total_bytes, None, allocated, verdict if bounded else None)

    verdict = estimate.outcome if bounded else None
    rows = [of_peer(method, answer) for method, answer in answers.items()]
    rows += [
        Row(ALLOCATED, run.peak_allocated_bytes, None, allocated if record else None, verdict),
        Row(RESERVED, run.peak_reserved_bytes, None, record.own_reserved_bytes if record else None, verdict),
        Row(PROCESS, estimate.process_bytes, None, record.process_bytes if record else None, verdict),
    ]
    unmeasured = None if record else str(measured)
    return Comparison(estimate.job, run.batch, budget, tuple(rows), record, unmeasured, seconds)


def find_measured(
    archive: Archive, model: str, batch: int, measure: Callable[[str], ResidentModel]
) -> Measured | None:
    """Return the published memory of a model at a batch size, or None if no allocated peak is stored.

    `measure` is called with the name of each earlier model that was still on the GPU, and returns its size.
    """
    peak = next(iter(archive.look_up(model, batch, PEAK_ALLOCATED)), None)
    if peak is None:
        return None
    reserved = (one for one in archive.look_up(model, batch, RESERVED) if one.source == peak.source)
    reserved_bytes = next((one.quantity.size_bytes for one in reserved), None)
    residents = tuple(map(measure, peak.residents))
    return Measured(peak.quantity.size_bytes, reserved_bytes, residents, peak.source)


def measured_by_run(run: Observation) -> Measured | None:
    """Convert a run of a calibration to `Measured`, or return None if its allocated peak is unknown."""
    if run.peak_allocated_bytes is None:
        return None
    recorded = {"torch": run.versions.torch, "cuda": run.versions.cuda}
    versions = {name: version for name, version in recorded.items() if version is not None}
    about = run.about or "a stored run of a calibration"
    return Measured(
        printed_bytes=run.peak_allocated_bytes,
        reserved_bytes=run.peak_reserved_bytes,
        residents=(),
        source=Source(f"{run.source} on {run.when}", "torch", about, run.when, run.gpu, versions),
        process_bytes=run.process_peak_bytes,
    )


def resident_bytes_after(trace: Trace) -> int:
    """Return the bytes of parameters, buffers and gradients that are allocated at the end of a trace.

    The sizes of the allocator's blocks count, which may be larger than the tensors.
    """
    recorder = TimelineRecorder()
    replay_trace(trace, on_event=recorder)
    at_end = {category: levels[-1] for category, levels in recorder.timeline().by_category.items()}
    return at_end[Category.PARAMETER] + at_end[Category.GRADIENT]
