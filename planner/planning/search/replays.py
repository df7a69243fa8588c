"""Replay the batch sizes of one job on GPUs, and share replays between GPUs."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TypeVar

from planner.allocator import (
    Block,
    CachingAllocator,
    MemoryLimits,
    Replay,
    is_limit_independent,
    max_reserved_bytes,
    replay_trace,
    replay_under_limits,
)
from planner.errors import ModelError
from planner.hardware import Budget
from planner.planning.estimate import unlimited
from planner.planning.search.boundary import boundary_from_guess, scan_islands
from planner.program import (
    FIT_BATCHES,
    BatchSizes,
    Event,
    LowerBound,
    Outcome,
    ProgramSet,
    Target,
    Trace,
)

_T = TypeVar("_T")
_REMEMBERED_TRACES = 4  # GPUs with the same memory need the same batch sizes
CLOSE_SHARE = 0.05  # of the largest batch size: the distance up to which a bound above it counts as close


@dataclass(slots=True)
class ReplayCache:
    """A cache of the replays of one job on all GPUs.

    GPUs whose traces are equal share a replay. A batch size that the job cannot use is replaced by the next
    smaller batch size that it can use.
    """

    programs: ProgramSet
    _peaks: dict[int, int] = field(default_factory=dict)  # reserved peaks without retries, by trace number
    _floors: dict[int, int] = field(default_factory=dict)  # lower bounds of `_peaks`, by trace number
    _numbers: dict[tuple[int, Target], int] = field(default_factory=dict)  # equal for equal traces
    _distinct: dict[Hashable, int] = field(default_factory=dict)
    _traces: dict[int, Trace] = field(default_factory=dict)
    _runs: dict[tuple[int, MemoryLimits], Replay] = field(default_factory=dict)

    def run(self, batch: int, target: Target, limits: MemoryLimits) -> Replay:
        """Return the cached replay of a batch size under memory limits. Raises the errors of a capture."""
        number = self._number(batch, target)
        run = self._runs.get((number, limits))
        if run is None:
            run = self._runs[number, limits] = replay_trace(self.trace(batch, target), limits)
            if is_limit_independent(limits):
                self._note(number, limits, run)
        return run

    def fits_undisturbed(self, batch: int, target: Target, limits: MemoryLimits) -> bool:
        """Return whether a batch size fits within memory limits without retries.

        The limits must be limit-independent: only a refused request may depend on the amount of memory.
        """
        number, limit_bytes = self._number(batch, target), max_reserved_bytes(limits)
        if limit_bytes is None:
            return True
        if number not in self._peaks and self._floors.get(number, 0) < limit_bytes:
            try:
                run = replay_trace(self.trace(batch, target), limits, _stop_at_retry)
            except _RetryError:
                self._floors[number] = limit_bytes
            else:
                self._note(number, limits, run)
        return self._peaks.get(number, limit_bytes + 1) <= limit_bytes

    def peak_without_limits(self, batch: int, target: Target, limits: MemoryLimits) -> int:
        """Return the reserved peak of a batch size in unlimited memory.

        The batch fits without retries if this much memory is available.
        """
        number = self._number(batch, target)
        if number not in self._peaks:
            self._peaks[number] = self.run(batch, target, unlimited(limits)).peak_reserved_bytes
        return self._peaks[number]

    def known_peak(self, batch: int, target: Target) -> int | None:
        """Return the cached reserved peak of a batch size without retries, or None if none is cached."""
        return self._peaks.get(self._number(batch, target))

    def _note(self, number: int, limits: MemoryLimits, run: Replay) -> None:
        """Cache the reserved peak of trace `number` if `run` fits without retries, else a lower bound."""
        if run.outcome is Outcome.FITS:
            self._peaks[number] = run.peak_reserved_bytes
        else:
            self._floors[number] = max(max_reserved_bytes(limits) or 0, self._floors.get(number, 0))

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the cached trace of a batch size. Raises the errors of a capture."""
        number = self._number(batch, target)
        batch = self.programs.batch_sizes(target).floor(batch)
        if number not in self._traces:
            if len(self._traces) >= _REMEMBERED_TRACES:
                del self._traces[next(iter(self._traces))]
            self._traces[number] = self.programs.trace(batch, target)
        return self._traces[number]

    def _number(self, batch: int, target: Target) -> int:
        number = self._numbers.get((batch, target))
        if number is None:
            taken = self.programs.batch_sizes(target).floor(batch)
            key = self.programs.key(taken, target)
            distinct = (taken, target if key is None else key)
            number = self._numbers[batch, target] = self._distinct.setdefault(distinct, len(self._distinct))
        return number


def outcome_under_limits(trace: Trace, all_limits: Sequence[MemoryLimits]) -> Outcome:
    """Return a trace's outcome under the smallest limit, or DOES_NOT_FIT if it fails under another.

    The first of `all_limits` is the smallest limit.
    """
    replay = partial(replay_trace, trace)
    return _also_in(all_limits[1:], replay(all_limits[0]).outcome, replay)


def _also_in(
    larger: Sequence[MemoryLimits], outcome: Outcome, replay: Callable[[MemoryLimits], Replay]
) -> Outcome:
    """Return `outcome`, or DOES_NOT_FIT if it needs retries and a replay under a larger limit fails.

    `outcome` is the outcome under the smallest limit. Only an outcome with retries takes further replays:
    without retries a batch fits under any larger limit.
    """
    if outcome is not Outcome.FITS_WITH_RETRIES:
        return outcome
    runs = replay_under_limits(larger, replay)
    fits = all(run.outcome is not Outcome.DOES_NOT_FIT for _, run in runs)
    return outcome if fits else Outcome.DOES_NOT_FIT


class _RetryError(Exception):
    """The error that stops a replay at its first retry."""


def _stop_at_retry(allocator: CachingAllocator, index: int, event: Event, block: Block | None) -> None:
    if allocator.retries:
        raise _RetryError


@dataclass(slots=True)
class TimedPrograms:
    """A program set that counts the seconds spent in calls to it."""

    programs: ProgramSet
    seconds: float = 0.0

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace at a batch size."""
        return self._timed(self.programs.trace, batch, target)

    def key(self, batch: int, target: Target) -> Hashable:
        """Return a key that two targets share if and only if their traces are equal, or None if unknown."""
        return self._timed(self.programs.key, batch, target)

    def bound(self, target: Target) -> LowerBound | None:
        """Return a function from the batch size to a lower bound of the memory in bytes, or None."""
        return self._timed(self.programs.bound, target)

    def batch_sizes(self, target: Target) -> BatchSizes:
        """Return the batch sizes that a search may try."""
        return self._timed(self.programs.batch_sizes, target)

    def _timed(self, call: Callable[..., _T], *args: object) -> _T:
        start = perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += perf_counter() - start


@dataclass(slots=True)
class TargetReplays:
    """The outcomes of one job's batch sizes on all GPUs with the same `target`."""

    replays: ReplayCache
    target: Target
    bound: LowerBound | None  # None if each batch size is captured by its own run of the model
    limit: int  # the largest batch size worth a probe
    is_compiled: bool = False  # whether the job is compiled, so that each trace is a run of the model
    too_large: dict[int, str] = field(default_factory=dict)  # batch sizes that cannot be captured, and why
    too_small: dict[int, str] = field(default_factory=dict)  # batch sizes that the model refuses, and why
    probes: dict[MemoryLimits, dict[int, Outcome]] = field(default_factory=dict)

    @property
    def batch_sizes(self) -> BatchSizes:
        """Return the batch sizes that the job can use."""
        return self.replays.programs.batch_sizes(self.target)

    @property
    def least(self) -> int:
        """Return the smallest batch size above all sizes that the model refused as too small."""
        return max(self.batch_sizes.floor(1), *(batch + 1 for batch in self.too_small), 1)

    def is_refused(self, batch: int) -> bool:
        """Return whether the capture of a batch size was tried and failed."""
        return batch in self.too_small or batch in self.too_large

    def top(self, limits: MemoryLimits) -> int:
        """Return the largest batch size up to `limit` that the memory's lower bound does not rule out."""
        limit_bytes = max_reserved_bytes(limits)
        if limit_bytes is None or self.bound is None:
            return self.limit
        return bisect_right(range(1, self.limit + 1), limit_bytes, key=self.bound)

    def fits(self, limits: MemoryLimits) -> Callable[[int], bool]:
        """Return a function that returns whether a batch size fits within memory limits."""
        return lambda batch: self.outcome(batch, limits) is not Outcome.DOES_NOT_FIT

    def fits_without_retries(self, limits: MemoryLimits) -> Callable[[int], bool]:
        """Return a function that returns whether a batch size fits within memory limits without retries.

        The function's replays stop at the first retry if the limits are limit-independent.
        """
        return lambda batch: self._fits_without_retries(batch, limits)

    def outcome(self, batch: int, limits: MemoryLimits) -> Outcome:
        """Return the cached outcome of a batch size, or DOES_NOT_FIT if the batch size cannot be captured.

        Errors at the batch sizes of FIT_BATCHES are raised, since other captures depend on them. A model may
        refuse smaller batches, as batch norm refuses single values.
        """
        probes = self.probes.setdefault(limits, {})
        if batch not in probes:
            try:
                probes[batch] = self._outcome(batch, limits)
            except ModelError as error:
                if FIT_BATCHES[0] <= batch <= FIT_BATCHES[-1]:
                    raise
                refused = self.too_small if batch < FIT_BATCHES[0] else self.too_large
                refused[batch] = str(error)
                probes[batch] = Outcome.DOES_NOT_FIT
        return probes[batch]

    def outcome_under_limits(self, batch: int, all_limits: Sequence[MemoryLimits]) -> Outcome:
        """Return a batch size's outcome under the smallest limit, or DOES_NOT_FIT if it fails under another.

        `all_limits[0]` is the smallest limit.
        """
        return _also_in(all_limits[1:], self.outcome(batch, all_limits[0]), partial(self.run, batch))

    def _fits_without_retries(self, batch: int, limits: MemoryLimits) -> bool:
        probes = self.probes.setdefault(limits, {})
        if batch in probes or not is_limit_independent(limits) or self._exceeds_bound(batch, limits):
            return self.outcome(batch, limits) is Outcome.FITS
        try:
            fits = self.replays.fits_undisturbed(batch, self.target, limits)
        except ModelError:
            return self.outcome(batch, limits) is Outcome.FITS
        if fits:
            probes[batch] = Outcome.FITS
        return fits

    def _exceeds_bound(self, batch: int, limits: MemoryLimits) -> bool:
        limit_bytes = max_reserved_bytes(limits)
        return limit_bytes is not None and self.bound is not None and self.bound(batch) > limit_bytes

    def _check_small(self, batch: int) -> None:
        """Capture a batch size if it is smaller than all FIT_BATCHES.

        The model may refuse such a batch. Raises the errors of the capture.
        """
        if batch < FIT_BATCHES[0]:
            self.replays.programs.key(self.batch_sizes.floor(batch), self.target)

    def _outcome(self, batch: int, limits: MemoryLimits) -> Outcome:
        if self._exceeds_bound(batch, limits):
            self._check_small(batch)
            return Outcome.DOES_NOT_FIT
        if self.undisturbed_peak(batch, limits) is not None:
            return Outcome.FITS
        return self.run(batch, limits).outcome

    def undisturbed_peak(self, batch: int, limits: MemoryLimits) -> int | None:
        """Return the cached reserved peak of a batch size that fits `limits` without retries, or None.

        The result is None if the peak is unknown or exceeds the limits, or if the limits affect the allocator
        other than by refusing requests.
        """
        if not is_limit_independent(limits):
            return None
        limit_bytes, peak_bytes = max_reserved_bytes(limits), self.replays.known_peak(batch, self.target)
        if peak_bytes is None or (limit_bytes is not None and peak_bytes > limit_bytes):
            return None
        return peak_bytes

    def peak_reserved_bytes(self, batch: int, limits: MemoryLimits) -> int:
        """Return the reserved peak of a batch size under `limits`, replayed only if no peak is cached."""
        peak_bytes = self.undisturbed_peak(batch, limits)
        return self.run(batch, limits).peak_reserved_bytes if peak_bytes is None else peak_bytes

    def peak_without_limits(self, batch: int, limits: MemoryLimits) -> int:
        """Return the reserved peak of a batch size in unlimited memory."""
        return self.replays.peak_without_limits(batch, self.target, limits)

    def expected(self, batch: int, budget: Budget) -> tuple[Outcome, MemoryLimits]:
        """Return a batch size's outcome and the memory limits for computing its peaks.

        The outcome holds at the budget's confidence. The returned limits are the likeliest limits, or
        unlimited memory if the batch does not fit under the likeliest limits either.
        """
        limits, outcome = budget.likely_limits, self.outcome_under_limits(batch, budget.all_limits)
        is_failing = outcome is Outcome.DOES_NOT_FIT and self.outcome(batch, limits) is outcome
        return outcome, unlimited(limits) if is_failing else limits

    def largest_without_retries(self, largest: int, limits: MemoryLimits) -> int:
        """Return the largest batch size, up to `largest`, that runs without retries.

        `largest` fits, with or without retries. Neighbours above the answer are probed if they could fit.
        """
        fits, limit_bytes = self.fits_without_retries(limits), max_reserved_bytes(limits)
        if not largest or fits(largest):
            return largest
        if limit_bytes is None or not is_limit_independent(limits):
            best = boundary_from_guess(fits, largest, largest)
        else:
            shared = 2 ** (largest.bit_length() - 1)  # searches for GPUs of similar memory use it as well
            guess = limit_bytes * shared // self.peak_without_limits(shared, limits)
            best = boundary_from_guess(fits, guess, largest)
            if self._needs_rise_evenly(best, largest, limits):
                return best
        return scan_islands(fits, best, largest)

    def _needs_rise_evenly(self, best: int, largest: int, limits: MemoryLimits) -> bool:
        """Return whether memory rises evenly with the batch size above `best`.

        An even rise rules out larger neighbours of `best`. An even rise is assumed if the lower bound rules
        out all batch sizes more than CLOSE_SHARE above `largest`, and one sample more than `best` adds at
        most twice the average of a sample. Otherwise blocks or workspaces may come and go from one batch size
        to the next (benchmarks/fits/search_neighbours.py counts the neighbours that are missed).
        """
        if not best or self.top(limits) > (1 + CLOSE_SHARE) * largest:
            return False
        need_bytes = self.peak_without_limits(best, limits)
        more_bytes = self.peak_without_limits(best + 1, limits) - need_bytes
        return 0 <= more_bytes <= 2 * need_bytes / best

    def run(self, batch: int, limits: MemoryLimits) -> Replay:
        """Return the cached replay of a batch size under memory limits. Raises the errors of a capture."""
        return self.replays.run(batch, self.target, limits)

    def trace(self, batch: int) -> Trace:
        """Return the trace of a batch size. Raises the errors of a capture."""
        return self.replays.trace(batch, self.target)
