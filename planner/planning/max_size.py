"""The largest size of samples, or patch of nnU-Net, that fits at one batch size."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from time import perf_counter

from msgspec import Struct

from planner.errors import BatchTooLargeError
from planner.hardware import Budget, judge_budget
from planner.jobs import Job, Size, SizeDistribution, size_ranges
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
    sizes: tuple[Size, ...]  # to choose from, rising
    search: Search  # over their numbers, from 1
    at_max: Estimate | None  # None where not even the smallest fits
    at_comfortable: Estimate | None  # None where none fits without retries
    first_failure: Estimate | None  # None where all sizes fit
    seconds: Seconds

    @property
    def largest(self) -> Size | None:
        """Return the largest size that fits at all; None where none does."""
        return self._size(self.search.largest)

    @property
    def comfortable(self) -> Size | None:
        """Return the largest size that fits without retries; None where none does."""
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

    Each probe is a run of the model at its size. Raises the errors of a capture.
    """
    start, traced = perf_counter(), 0.0

    @cache
    def at(number: int) -> Estimate:
        nonlocal traced
        begun = perf_counter()
        own = job_at(sizes[number - 1])
        trace = with_last_batch(own, batch, open_traces(own))
        spent = perf_counter() - begun
        traced += spent
        return estimate_batch(own, trace, judge_budget(budget, own, trace), spent)

    def outcome(number: int) -> Outcome:
        try:
            return at(number).outcome
        except BatchTooLargeError:
            return Outcome.DOES_NOT_FIT

    limit_bytes = budget.limits.allocator_limit_bytes
    if len(sizes) <= FEW or limit_bytes is None:
        search = largest(outcome, len(sizes))
    else:
        ends = max(1, len(sizes) // 16), max(2, len(sizes) // 8)
        need = partial(_need_bytes, at)
        search = largest_by_extrapolation(outcome, (need, need), limit_bytes, ends, len(sizes))
    failure = search.first_failure
    seconds = Seconds(traced, perf_counter() - start - traced)
    at_max, at_comfortable = (at(n) if n else None for n in (search.largest, search.comfortable))
    first_failure = None if failure is None else _estimate_or_none(at, failure)
    return SizePlan(
        job, budget, batch, tuple(sizes), search, at_max, at_comfortable, first_failure, seconds
    )  # fmt: skip


def _need_bytes(at: Callable[[int], Estimate], number: int) -> int:
    return at(number).run.peak_reserved_bytes


def _estimate_or_none(at: Callable[[int], Estimate], number: int) -> Estimate | None:
    try:
        return at(number)
    except BatchTooLargeError:
        return None
