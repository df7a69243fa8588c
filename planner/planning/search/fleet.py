"""Find the largest batch sizes of one job on many GPUs.

Each GPU is searched by itself. GPUs share only results that hold for certain: a replay that fits without
releasing cached memory is the same on every GPU that has at least the replay's peak, and a batch whose
tensors alone exceed a GPU's memory is known not to fit without any replay.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import replay_trace
from planner.errors import ModelError
from planner.hardware import Budget, PriceList, judge_budget, process_bytes, upper_process_bytes
from planner.jobs import Compile, Job
from planner.planning.epoch import max_useful_batch
from planner.planning.estimate import Answer, Seconds, estimate_batch, unlimited
from planner.planning.quote import Quote
from planner.planning.search.one_gpu import search_judged
from planner.planning.search.replays import ReplayCache, TargetReplays
from planner.program import Outcome, ProgramSet


class DeviceFit(Struct, frozen=True):
    """The largest batch size of a job on one GPU, and the memory that `batch` takes."""

    budget: Budget
    max_batch: int  # 0 if not even the smallest batch size that trains fits
    batch: int  # the batch size of the figures below: the requested, else the largest, else the smallest
    outcome: Outcome  # of `batch` on this GPU, at the confidence
    process_bytes: int  # the peak in nvidia-smi; in unlimited memory if `batch` is not expected to fit
    process_upper_bytes: int  # upper bound of `process_bytes` at the confidence
    comfortable_batch: int  # the largest without retries; 0 if no batch size fits without retries
    answer: Answer = Answer.FITS  # whether `batch` fits, graded by its probability
    p_out_of_memory: float | None = None  # None if `batch` fits at the confidence, or if it is unknown

    @property
    def headroom_bytes(self) -> int:
        """Return the GPU's usable bytes minus the bytes of the process; negative if it does not fit."""
        return self.budget.device.usable.value - self.process_bytes

    @property
    def is_calibrated(self) -> bool:
        """Return whether the figures come from a linear fit to measured runs of the job."""
        return self.budget.correction is not None and self.budget.correction.fit is not None


class FleetTable(Struct, frozen=True):
    """The largest batch sizes of one job on many GPUs, with the time that the search took."""

    job: Job
    batch: int | None  # None if the largest batch of each GPU is requested
    confidence: float
    fits: tuple[DeviceFit, ...]  # in the requested order
    left_out: int  # number of GPUs that do not run the requested batch
    notes: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    import_seconds: float
    seconds: Seconds
    programs: ProgramSet  # behind the answers; a picture needs more traces
    multiple_of: int = 1  # the number of which the largest batches had to be multiples
    prices: PriceList | None = None
    quotes: Mapping[str, Quote] = {}  # by the GPU's name; empty without prices and throughput
    likely: tuple[DeviceFit, ...] = ()  # GPUs on which the batch may fit, but not at the confidence


def curve(table: FleetTable, points: int = 40) -> tuple[tuple[int, int], ...]:
    """Return batch sizes up to the largest that fits on any GPU, each with its process memory.

    The memory is in bytes, and computed for the GPU with the median largest batch size, without calibration
    and in unlimited memory. About `points` evenly spaced batch sizes are used. Batch sizes that the model
    refuses are skipped.
    """
    by_size = sorted((fit for fit in table.fits if fit.max_batch), key=lambda fit: fit.max_batch)
    budget, top = by_size[len(by_size) // 2].budget, by_size[-1].max_batch
    sizes = sorted({max(1, round(top * step / points)) for step in range(points + 1)})
    plain, limits = replace(budget, correction=None), unlimited(budget.limits)
    rows = []
    for size in sizes:
        with suppress(ModelError):  # raised at a size that the model refuses
            run = replay_trace(table.programs.trace(size, budget.device.target), limits)
            rows.append((size, process_bytes(plain, run.peak_reserved_bytes)))
    return tuple(rows)


def fit_devices(
    job: Job, budgets: Iterable[Budget], programs: ProgramSet, batch: int | None = None, multiple_of: int = 1
) -> tuple[DeviceFit, ...]:
    """Return the largest batch size and one batch's memory on each GPU, sorted by kind and usable memory.

    The memory is computed for `batch`, or by default for the largest batch size, or the smallest if none
    fits. The results are not in the order of `budgets`. The largest batch sizes are multiples of
    `multiple_of`. Raises the errors of a capture.
    """
    ordered = sorted(budgets, key=lambda budget: (budget.device.target.kind, budget.device.usable.value))
    cache, limit, is_compiled = (
        ReplayCache(programs),
        max_useful_batch(job),
        job.model.compile is not Compile.NONE,
    )
    by_kind = {
        target.kind: TargetReplays(cache, target, programs.bound(target), limit, is_compiled)
        for budget in ordered
        for target in [budget.device.target]
    }
    return tuple(
        _fit(job, by_kind[budget.device.target.kind], budget, batch, multiple_of) for budget in ordered
    )


def _fit(
    job: Job, replays: TargetReplays, budget: Budget, requested: int | None, multiple_of: int
) -> DeviceFit:
    search, budget = search_judged(job, replays, budget, multiple_of)
    batch = requested or search.largest or search.least
    if batch != search.largest:
        with suppress(ModelError):
            budget = judge_budget(budget, job, replays.trace(batch))
    outcome, limits = replays.expected(batch, budget)
    peak_bytes = replays.peak_reserved_bytes(batch, limits)
    answer, chance = Answer.FITS, None
    if outcome is Outcome.DOES_NOT_FIT:
        answer = Answer.DOES_NOT_FIT
        if limits == budget.likely_limits:  # it fits in the memory that is expected
            estimate = estimate_batch(job, replays.trace(batch), budget)
            answer, chance = estimate.answer or answer, estimate.p_out_of_memory
    return DeviceFit(
        budget,
        search.largest,
        batch,
        outcome,
        process_bytes(budget, peak_bytes),
        upper_process_bytes(budget, peak_bytes),
        search.comfortable,
        answer,
        chance,
    )
