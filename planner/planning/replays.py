"""Replays of one job on GPUs of one kind, each made once."""

from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TypeVar

from planner.allocator import MemoryLimits, Replay, max_reserved_bytes, replay_trace
from planner.errors import BatchTooLargeError
from planner.planning.estimate import unlimited
from planner.planning.search import boundary_by_line, boundary_from_guess
from planner.program import FIT_BATCHES, LowerBound, Outcome, ProgramSet, Target, Trace

_T = TypeVar("_T")
_REMEMBERED_TRACES = 4  # GPUs with the same memory need the same batch sizes


@dataclass(slots=True)
class ReplayCache:
    """Replays of one job on GPUs of all kinds; those that run the same events share them."""

    programs: ProgramSet
    hints: dict[int, int] = field(default_factory=dict)  # peaks without limits by batch size, on any GPU
    _peaks: dict[int, int] = field(default_factory=dict)  # reserved, of undisturbed runs, by trace
    _numbers: dict[tuple[int, Target], int] = field(default_factory=dict)  # of traces, equal for equal ones
    _distinct: dict[Hashable, int] = field(default_factory=dict)
    _traces: dict[int, Trace] = field(default_factory=dict)
    _runs: dict[tuple[int, MemoryLimits], Replay] = field(default_factory=dict)

    def run(self, batch: int, target: Target, limits: MemoryLimits) -> Replay:
        """Return the replay of a batch size. Raises the errors of a capture."""
        number = self._number(batch, target)
        run = self._runs.get((number, limits))
        if run is None:
            if number not in self._traces:
                if len(self._traces) >= _REMEMBERED_TRACES:
                    del self._traces[next(iter(self._traces))]
                self._traces[number] = self.programs.trace(batch, target)
            run = self._runs[number, limits] = replay_trace(self._traces[number], limits)
            if run.outcome is Outcome.FITS and is_limit_independent(limits):
                self._peaks[number] = run.peak_reserved_bytes
        return run

    def peak_without_limits(self, batch: int, target: Target, limits: MemoryLimits) -> int:
        """Return the reserved peak without limits: a batch fits without retries where so much is there."""
        number = self._number(batch, target)
        if number not in self._peaks:
            self._peaks[number] = self.run(batch, target, unlimited(limits)).peak_reserved_bytes
        self.hints[batch] = self._peaks[number]
        return self._peaks[number]

    def known_peak(self, batch: int, target: Target) -> int | None:
        """Return the reserved peak of a run that no limit disturbed; None where there was none."""
        return self._peaks.get(self._number(batch, target))

    def _number(self, batch: int, target: Target) -> int:
        number = self._numbers.get((batch, target))
        if number is None:
            key = self.programs.key(batch, target)
            distinct = (batch, target if key is None else key)
            number = self._numbers[batch, target] = self._distinct.setdefault(distinct, len(self._distinct))
        return number


@dataclass(slots=True)
class TimedPrograms:
    """Programs that count the seconds which their traces take."""

    programs: ProgramSet
    seconds: float = 0.0

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace at a batch size."""
        return self._timed(self.programs.trace, batch, target)

    def key(self, batch: int, target: Target) -> Hashable:
        """Return the key by which the traces of one batch size differ."""
        return self._timed(self.programs.key, batch, target)

    def bound(self, target: Target) -> LowerBound | None:
        """Return a lower bound of what tensors take."""
        return self._timed(self.programs.bound, target)

    def _timed(self, call: Callable[..., _T], *args: object) -> _T:
        start = perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += perf_counter() - start


@dataclass(slots=True)
class TargetReplays:
    """Replays on GPUs of one kind."""

    replays: ReplayCache
    target: Target
    bound: LowerBound | None  # None: each trace is a run of the model
    limit: int  # the largest batch size worth a probe
    too_large: dict[int, str] = field(default_factory=dict)  # batch sizes that cannot be captured, and why
    probes: dict[MemoryLimits, dict[int, Outcome]] = field(default_factory=dict)

    def top(self, limits: MemoryLimits) -> int:
        """Return the largest batch size that the bound, which rises with it, does not rule out."""
        room = max_reserved_bytes(limits)
        if room is None or self.bound is None:
            return self.limit
        return bisect_right(range(1, self.limit + 1), room, key=self.bound)

    def fits(self, limits: MemoryLimits) -> Callable[[int], bool]:
        """Return the predicate whether a batch size fits."""
        return lambda batch: self.outcome(batch, limits) is not Outcome.DOES_NOT_FIT

    def fits_without_retries(self, limits: MemoryLimits) -> Callable[[int], bool]:
        """Return the predicate whether a batch size fits without retries."""
        return lambda batch: self.outcome(batch, limits) is Outcome.FITS

    def outcome(self, batch: int, limits: MemoryLimits) -> Outcome:
        """Return whether a batch size fits; one that cannot be captured does not."""
        probes = self.probes.setdefault(limits, {})
        if batch not in probes:
            try:
                probes[batch] = self._outcome(batch, limits)
            except BatchTooLargeError as error:
                self.too_large[batch] = str(error)
                probes[batch] = Outcome.DOES_NOT_FIT
        return probes[batch]

    def _outcome(self, batch: int, limits: MemoryLimits) -> Outcome:
        room = max_reserved_bytes(limits)
        if room is not None and self.bound is not None and self.bound(batch) > room:
            return Outcome.DOES_NOT_FIT
        if self.undisturbed_peak(batch, limits) is not None:
            return Outcome.FITS
        return self.run(batch, limits).outcome

    def undisturbed_peak(self, batch: int, limits: MemoryLimits) -> int | None:
        """Return the peak of a known run that goes the same way under these limits; None: there is none."""
        if not is_limit_independent(limits):
            return None
        room, peak_bytes = max_reserved_bytes(limits), self.replays.known_peak(batch, self.target)
        return None if peak_bytes is None or (room is not None and peak_bytes > room) else peak_bytes

    def peak_reserved_bytes(self, batch: int, limits: MemoryLimits) -> int:
        """Return the reserved peak of a batch that fits."""
        peak_bytes = self.undisturbed_peak(batch, limits)
        return self.run(batch, limits).peak_reserved_bytes if peak_bytes is None else peak_bytes

    def peak_without_limits(self, batch: int, limits: MemoryLimits) -> int:
        """Return the reserved peak without limits."""
        return self.replays.peak_without_limits(batch, self.target, limits)

    def largest_without_retries(self, largest: int, limits: MemoryLimits) -> int:
        """Return the largest batch size that runs without retries up to `largest`, which fits."""
        if not largest or self.outcome(largest, limits) is Outcome.FITS:
            return largest
        room = max_reserved_bytes(limits)
        if not is_limit_independent(limits) or room is None:
            return boundary_from_guess(self.fits_without_retries(limits), largest, largest)
        need_bytes = partial(self.peak_without_limits, limits=limits)
        return boundary_by_line(need_bytes, room, self.replays.hints, largest)

    def is_random(self) -> bool:
        """Return whether each trace is a run of the model with random values in it."""
        return self.bound is None and self.replays.programs.trace(FIT_BATCHES[0], self.target).is_random

    def run(self, batch: int, limits: MemoryLimits) -> Replay:
        """Return the replay of a batch size. Raises the errors of a capture."""
        return self.replays.run(batch, self.target, limits)


def is_limit_independent(limits: MemoryLimits) -> bool:
    """Return whether nothing but a refused request lets the allocator act on how much memory there is."""
    config = limits.config
    fraction = config.per_process_memory_fraction < 1
    return not (config.expandable_segments or config.garbage_collection_threshold > 0 or fraction)
