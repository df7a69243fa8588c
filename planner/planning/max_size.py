"""The largest size of samples, or patch of nnU-Net, that fits at one batch size."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import BatchTooLargeError, ModelError
from planner.hardware import Budget, judge_budget
from planner.jobs import Job, Size, SizeDistribution, at_size, size_ranges
from planner.planning.epoch import with_last_batch
from planner.planning.estimate import Estimate, Seconds, estimate_batch
from planner.planning.search import Search, largest, largest_by_extrapolation
from planner.program import Outcome, TraceSource

FEW = 8  # sizes, of which no line leads to the largest sooner than halving does


class SizePlan(Struct, frozen=True):
    """The largest size that fits, and the estimates on both sides of it."""

    job: Job  # as it was given, with its ranges or its patch
    budget: Budget
    batch: int
    sizes: tuple[Size, ...]  # to choose from, rising, from the smallest that the model takes
    search: Search  # over their numbers, from 1
    at_max: Estimate | None  # None where not even the smallest fits
    at_comfortable: Estimate | None  # None where none fits without retries
    first_failure: Estimate | None  # None where all sizes fit
    seconds: Seconds
    refusal: str = ""  # why the model refuses sizes below the smallest that was searched; "": it refuses none

    @property
    def largest(self) -> Size | None:
        """Return the largest size that fits, with retries or without, or None if none does."""
        return self._size(self.search.largest)

    @property
    def comfortable(self) -> Size | None:
        """Return the largest size that fits without retries, or None if none does."""
        return self._size(self.search.comfortable)

    @property
    def failing(self) -> Size | None:
        """Return the smallest size that was found not to fit."""
        return self._size(self.search.first_failure)

    def _size(self, number: int | None) -> Size | None:
        return self.sizes[number - 1] if number else None


def sizes_between(job: Job) -> tuple[Size, ...]:
    """Return the sizes between the ends of a job's ranges, rising, padded as the job pads.

    Several ranges grow together, each by its share, so that the aspect stays.
    """
    ranges = size_ranges(job)
    if len(ranges) == 1:
        return tuple((size,) for size in SizeDistribution(ranges, pad_to=job.pad_to).paddings())
    steps = max(high - low for low, high in ranges)
    unit = job.pad_to
    return tuple(
        dict.fromkeys(
            tuple(-(-(low + round((high - low) * step / steps)) // unit) * unit for low, high in ranges)
            for step in range(steps + 1)
        )
    )


def find_max_size(
    job: Job,
    budget: Budget,
    batch: int,
    sizes: Sequence[Size],
    job_at: Callable[[Size], Job],
    open_traces: Callable[[Job], TraceSource],
) -> SizePlan:
    """Return the largest of the sizes that fits at this batch size.

    Each probe is a run of the model at its size. If the model refuses small sizes, the search begins at the
    smallest that it takes. Raises the errors of a capture.
    """
    start, traced = perf_counter(), 0.0

    @cache
    def estimate_at(size: Size) -> Estimate:
        nonlocal traced
        begun = perf_counter()
        own = job_at(size)
        trace = with_last_batch(own, batch, open_traces(own))
        spent = perf_counter() - begun
        traced += spent
        return estimate_batch(own, trace, judge_budget(budget, own, trace), spent)

    refusal = ""
    try:
        search = _search(sizes, estimate_at, partial(_elements, job))
    except ModelError as error:
        if _is_taken(estimate_at, sizes[0]):
            raise
        refusal = str(error).rpartition("; ")[0]  # without its remedy
        sizes = sizes[_count_refused(sizes, estimate_at, error) :]
        search = _search(sizes, estimate_at, partial(_elements, job))

    def side(number: int | None) -> Estimate | None:
        own = _estimate_or_none(estimate_at, sizes[number - 1]) if number else None
        if own is None or not refusal:
            return own
        note = f"sizes are tried from {'x'.join(map(str, sizes[0]))} on: {refusal}"
        return replace(own, notes=(*own.notes, note))

    sides = (side(number) for number in (search.largest, search.comfortable, search.first_failure))
    at_max, at_comfortable, first_failure = sides
    seconds = Seconds(traced, perf_counter() - start - traced)
    return SizePlan(
        job, budget, batch, tuple(sizes), search, at_max, at_comfortable, first_failure, seconds, refusal
    )  # fmt: skip


def _elements(job: Job, size: Size) -> int:
    """Return the number of elements of a sample's largest input at a size, or of a patch."""
    if not size_ranges(job):
        return prod(size)
    return max(prod(spec.shape) for spec in at_size(job, size).inputs)


def _search(
    sizes: Sequence[Size], estimate_at: Callable[[Size], Estimate], elements: Callable[[Size], int]
) -> Search:
    """Search the sizes by their places in the list, from 1. Raises the errors of a capture."""

    def outcome(number: int) -> Outcome:
        try:
            return estimate_at(sizes[number - 1]).outcome
        except BatchTooLargeError:
            return Outcome.DOES_NOT_FIT

    def need_bytes(number: int) -> int:
        return estimate_at(sizes[number - 1]).run.peak_reserved_bytes

    if len(sizes) <= FEW:
        return largest(outcome, len(sizes))
    ends = max(1, len(sizes) // 16), max(2, len(sizes) // 8)
    judged = estimate_at(sizes[ends[0] - 1]).budget  # with the margins of runs that the job is like
    limit_bytes = judged.limits.allocator_limit_bytes
    if limit_bytes is None:
        return largest(outcome, len(sizes))
    return largest_by_extrapolation(
        outcome,
        (need_bytes, need_bytes),
        limit_bytes,
        ends,
        len(sizes),
        lambda number: elements(sizes[number - 1]),
    )


def _count_refused(
    sizes: Sequence[Size], estimate_at: Callable[[Size], Estimate], refusal: ModelError
) -> int:
    """Return the number of sizes that the model refuses as too small. Raises the refusal if it takes none."""
    last = len(sizes) - 1
    low, high = 0, min(1, last)
    while not _is_taken(estimate_at, sizes[high]):
        if high == last:
            raise refusal
        low, high = high, min(2 * high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_taken(estimate_at, sizes[middle]) else (middle, high)
    return high


def _is_taken(estimate_at: Callable[[Size], Estimate], size: Size) -> bool:
    try:
        estimate_at(size)
    except BatchTooLargeError:
        return True
    except ModelError:
        return False
    return True


def _estimate_or_none(estimate_at: Callable[[Size], Estimate], size: Size) -> Estimate | None:
    try:
        return estimate_at(size)
    except BatchTooLargeError:
        return None
