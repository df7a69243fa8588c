"""Find the largest sample size, or patch size of nnU-Net, that fits at one batch size."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import is_limit_independent, max_reserved_bytes, replay_trace
from planner.errors import BatchTooLargeError, ModelError
from planner.hardware import Budget, judge_budget
from planner.jobs import Job, Size, SizeDistribution, at_size, size_ranges
from planner.planning.epoch import with_last_batch
from planner.planning.estimate import Estimate, Seconds, estimate_batch, unlimited
from planner.planning.search.boundary import (
    Search,
    boundary_above,
    largest,
    largest_by_extrapolation,
    search_of,
)
from planner.planning.search.replays import outcome_under_limits
from planner.program import Outcome, Trace, TraceSource

ALIGNED = 8  # values of 16 bits that 16 bytes hold
FEW = 8  # the number of sizes up to which halving takes no more probes than extrapolation


class SizePlan(Struct, frozen=True):
    """The largest sample sizes that fit, with estimates at them and at the smallest size that fails."""

    job: Job  # the job as it was given, with its size ranges or its patch
    budget: Budget
    batch: int
    sizes: tuple[Size, ...]  # the searched sizes in ascending order, without sizes that the model refuses
    search: Search  # its batch sizes are positions in `sizes`, counted from 1
    at_max: Estimate | None  # None if not even the smallest size fits
    at_comfortable: Estimate | None  # None if no size fits without retries
    first_failure: Estimate | None  # None if all sizes fit, or if the batch is too large to capture
    seconds: Seconds
    refusal: str = ""  # why the model refuses sizes below the searched sizes; empty if it refuses no size
    refusal_of_larger: str = ""  # why it refuses sizes above the searched sizes; empty if it refuses no size

    @property
    def largest(self) -> Size | None:
        """Return the largest size that fits, with or without retries, or None if no size fits."""
        return self._size(self.search.largest)

    @property
    def comfortable(self) -> Size | None:
        """Return the largest size that fits without retries, or None if no size does."""
        return self._size(self.search.comfortable)

    @property
    def failing(self) -> Size | None:
        """Return the smallest probed size that does not fit, or None if all fit."""
        return self._size(self.search.first_failure)

    def _size(self, number: int | None) -> Size | None:
        return self.sizes[number - 1] if number else None


def sizes_between(job: Job) -> tuple[Size, ...]:
    """Return the padded sample sizes within a job's size ranges, in ascending order.

    Several ranges grow together, each by the same fraction of its length.
    """
    ranges = size_ranges(job)
    if len(ranges) == 1:
        return tuple((size,) for size in SizeDistribution(ranges, pad_to=job.samples.pad_to).paddings())
    steps = max(high - low for low, high in ranges)
    unit = job.samples.pad_to
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
    """Find the largest of `sizes` that fit at a batch size, with and without retries, and estimate them.

    Each probe is a run of the model at one size. If the model refuses small or large sizes, the search begins
    at the smallest size that the model takes, or ends at the largest. Raises the errors of a capture.
    """
    start, runs = perf_counter(), _Runs(budget, batch, job_at, open_traces)
    refusal = refusal_of_larger = ""
    elements = partial(_elements, job)
    search = None
    while search is None:
        try:
            search = _search(sizes, runs, elements)
        except ModelError as error:
            reason = str(error).rpartition("; ")[0]  # without its remedy
            if not refusal and not runs.is_taken(sizes[0]):
                refusal, sizes = reason, sizes[_count_refused(sizes, runs, error) :]
            elif not refusal_of_larger and runs.is_taken(sizes[0]):
                refusal_of_larger, sizes = reason, sizes[: -_count_refused(sizes[::-1], runs, error)]
            else:
                raise

    notes = []
    if refusal:
        notes.append(f"sizes are tried from {'x'.join(map(str, sizes[0]))} on: {refusal}")
    if refusal_of_larger:
        notes.append(f"sizes are tried up to {'x'.join(map(str, sizes[-1]))}: {refusal_of_larger}")

    def side(number: int | None) -> Estimate | None:
        own = runs.estimate(sizes[number - 1]) if number else None
        return own if own is None or not notes else replace(own, notes=(*own.notes, *notes))

    sides = (side(number) for number in (search.largest, search.comfortable, search.first_failure))
    at_max, at_comfortable, first_failure = sides
    seconds = Seconds(runs.seconds, perf_counter() - start - runs.seconds)
    return SizePlan(
        job,
        budget,
        batch,
        tuple(sizes),
        search,
        at_max,
        at_comfortable,
        first_failure,
        seconds,
        refusal,
        refusal_of_larger,
    )


def _elements(job: Job, size: Size) -> int:
    """Return the number of elements of a sample's inputs at a size, or of a patch without size ranges."""
    if not size_ranges(job):
        return prod(size)
    return sum(prod(spec.shape) for spec in at_size(job, size).samples.inputs)


def _search(sizes: Sequence[Size], runs: "_Runs", elements: Callable[[Size], int]) -> Search:
    """Search for the largest sizes that fit, with and without retries, as positions in `sizes` from 1.

    Raises the errors of a capture. If more than `FEW` sizes are multiples of 8, the multiples are searched
    first. Other sizes may take more memory, as attention pads rows that are not aligned, so the sizes between
    an answer and the next multiple are tried only if the smallest of them fits.
    """
    aligned = [number for number, size in enumerate(sizes, 1) if not any(each % ALIGNED for each in size)]
    if len(aligned) <= FEW or len(aligned) == len(sizes):
        return _search_along_lines(sizes, runs, elements)
    coarse = _search_along_lines([sizes[number - 1] for number in aligned], runs, elements)

    def refine(place: int, outcomes: Container[Outcome]) -> int:
        number = aligned[place - 1] if place else 0
        above = aligned[place] if place < len(aligned) else len(sizes) + 1

        def fits(each: int) -> bool:
            size = sizes[each - 1]
            return runs.is_taken(size) and runs.outcome(size) in outcomes

        return boundary_above(fits, number, above)

    best = refine(coarse.largest, (Outcome.FITS, Outcome.FITS_WITH_RETRIES))
    is_comfortable = best and runs.outcome(sizes[best - 1]) is Outcome.FITS
    comfortable = best if is_comfortable else refine(coarse.comfortable, (Outcome.FITS,))
    probes = {number: runs.outcomes[size] for number, size in enumerate(sizes, 1) if size in runs.outcomes}
    failures = (each for each, own in probes.items() if own is Outcome.DOES_NOT_FIT and each > best)
    return replace(search_of(probes, best, comfortable), first_failure=min(failures, default=None))


def _search_along_lines(sizes: Sequence[Size], runs: "_Runs", elements: Callable[[Size], int]) -> Search:
    def outcome(number: int) -> Outcome:
        return runs.outcome(sizes[number - 1])

    def need_bytes(number: int) -> int:
        return runs.reserved_bytes(sizes[number - 1])

    if len(sizes) <= FEW:
        return largest(outcome, len(sizes))
    ends = max(1, len(sizes) // 16), max(2, len(sizes) // 8)
    limit_bytes = runs.budget_at(sizes[ends[0] - 1]).limits.allocator_limit_bytes
    if limit_bytes is None:
        return largest(outcome, len(sizes))
    return largest_by_extrapolation(
        outcome, (need_bytes,), limit_bytes, ends, len(sizes), lambda number: elements(sizes[number - 1])
    )


def _count_refused(sizes: Sequence[Size], runs: "_Runs", refusal: ModelError) -> int:
    """Return the number of leading sizes that the model refuses.

    Raises `refusal` if the model takes the first size, or none of the sizes.
    """
    last = len(sizes) - 1
    low, high = 0, min(1, last)
    if runs.is_taken(sizes[0]):
        raise refusal
    while not runs.is_taken(sizes[high]):
        if high == last:
            raise refusal
        low, high = high, min(2 * high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs.is_taken(sizes[middle]) else (middle, high)
    return high


@dataclass(slots=True)
class _Runs:
    """The cached traces, outcomes and estimates of a job by sample size."""

    budget: Budget
    batch: int
    job_at: Callable[[Size], Job]
    open_traces: Callable[[Job], TraceSource]
    seconds: float = 0.0  # spent in captures
    outcomes: dict[Size, Outcome] = field(default_factory=dict)
    _reserved: dict[Size, int] = field(default_factory=dict)
    _traces: dict[Size, tuple[Job, Trace, Budget]] = field(default_factory=dict)
    _estimates: dict[Size, Estimate] = field(default_factory=dict)

    def budget_at(self, size: Size) -> Budget:
        """Return the budget with the margins that apply to the job at a size.

        The margins come from published runs of similar jobs. Raises the errors of a capture.
        """
        return self._trace(size)[2]

    def outcome(self, size: Size) -> Outcome:
        """Return the cached outcome of a size, or DOES_NOT_FIT if its batch is too large to capture.

        Raises the other errors of a capture.
        """
        if size not in self.outcomes:
            self.outcomes[size] = self._outcome(size)
        return self.outcomes[size]

    def reserved_bytes(self, size: Size) -> int:
        """Return the reserved peak of a size in unlimited memory. Raises the errors of a capture."""
        if size not in self._reserved:
            _, trace, budget = self._trace(size)
            self._reserved[size] = replay_trace(trace, unlimited(budget.limits)).peak_reserved_bytes
        return self._reserved[size]

    def estimate(self, size: Size) -> Estimate | None:
        """Return the estimate at a size, or None if the batch is too large to capture."""
        try:
            job, trace, budget = self._trace(size)
        except BatchTooLargeError:
            return None
        if size not in self._estimates:
            self._estimates[size] = estimate_batch(job, trace, budget)
        return self._estimates[size]

    def is_taken(self, size: Size) -> bool:
        """Return whether the model accepts samples of a size.

        A size whose batch is too large to capture counts as accepted.
        """
        try:
            self._trace(size)
        except BatchTooLargeError:
            return True
        except ModelError:
            return False
        return True

    def _outcome(self, size: Size) -> Outcome:
        try:
            _, trace, budget = self._trace(size)
        except BatchTooLargeError:
            return Outcome.DOES_NOT_FIT
        if trace.growth_sources:  # then the number of steps decides
            estimate = self.estimate(size)
            assert estimate is not None
            return estimate.outcome
        limit_bytes = max_reserved_bytes(budget.limits)
        peak_bytes = self._reserved.get(size) if is_limit_independent(budget.limits) else None
        if limit_bytes and peak_bytes is not None and peak_bytes <= limit_bytes:
            return Outcome.FITS
        return outcome_under_limits(trace, budget.all_limits)

    def _trace(self, size: Size) -> tuple[Job, Trace, Budget]:
        if size not in self._traces:
            start, job = perf_counter(), self.job_at(size)
            trace = with_last_batch(job, self.batch, self.open_traces(job))
            self.seconds += perf_counter() - start
            self._traces[size] = job, trace, judge_budget(self.budget, job, trace)
        return self._traces[size]
