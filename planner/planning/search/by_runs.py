"""Find the largest batch sizes of a job whose traces must each be captured by a run.

A run takes several seconds. An example is a job with a compiled model, since inductor compiles the model
again for each batch size. The traces of captured batch sizes are fitted to a program for batch sizes near
them. Replays of the program choose the next batch size to capture, until the answers themselves are captured,
so that no answer is a guess. The batch size after an answer is captured too, to show that it does not fit.
For a compiled model it is instead ruled out by a fit of two captured traces, or else by the trace of the
answer with its tensors scaled in proportion.

inductor times products with padded operands if a size is no multiple of 16 bytes, which takes memory
(`planner.capture.inductor.padding`). So compiled batch sizes are fitted by the power of two that divides
them. Multiples of eight are searched first, and the batch sizes just above the answer last, until a run of
another alignment shows that alignment does not matter to the model. Padding only takes more memory, so a
batch size of any alignment is ruled out by the memory of its neighbour. Of large compiled batch sizes only
multiples of eight are searched: the batch sizes between them are less than a hundredth larger.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import gcd

from msgspec.structs import replace

from planner.allocator import MemoryLimits
from planner.errors import ModelError
from planner.planning.search.boundary import Search, largest, largest_near, search_of
from planner.planning.search.replays import TargetReplays, outcome_under_limits
from planner.program import (
    FIT_BATCHES,
    Alloc,
    NotAffineError,
    Outcome,
    Program,
    Trace,
    fit_by_site,
    fit_traces,
    nearest_affine,
    scaled_program,
)

_FIRST_COMPILED = 32
_ALIGNED = 8  # values of the smallest type that 16 bytes hold
_MOST_STRETCH = 128  # a trace predicts batch sizes up to this many times its own
_FELT = 0.03  # a deviation of more than this share of the expected bytes is taken for padding
_NEAR = 1.5  # ratio of batch sizes up to which a trace scaled in proportion predicts the allocated bytes
_ALIGNED_ALONE = 1024  # of compiled batch sizes of at least this, only multiples of eight are tried
_MOST_RUNS = 12  # runs chosen by guesses; after them the search uses runs alone
_MOST_EVENTS = 500_000  # of a trace that a search captures, which takes about a minute


def first_run(is_compiled: bool) -> int:
    """Return the batch size to capture first.

    For a job that is not compiled, it is FIT_BATCHES[0]: the failed fit of a program has captured it already.
    """
    return _FIRST_COMPILED if is_compiled else FIT_BATCHES[0]


def note_on_runs(search: Search, is_compiled: bool) -> str:
    """Return a note that lists the batch sizes that were captured."""
    sizes = ", ".join(map(str, sorted(size for size, _ in search.probes)))
    traced = f"batch sizes {sizes} were traced; that no larger one fits is taken from these traces"
    if not is_compiled or search.largest < _ALIGNED_ALONE:
        return traced
    return f"{traced}; from {_ALIGNED_ALONE} on multiples of {_ALIGNED} alone were tried"


def search_by_runs(replays: TargetReplays, all_limits: Sequence[MemoryLimits]) -> Search:
    """Find the largest batch sizes that fit all memory limits, with and without retries.

    The answers and the batch sizes after them were captured; compiled batch sizes after an answer may be
    ruled out by other traces. Raises the errors of a capture.
    """
    return _RunSearch(replays, all_limits).find()


@dataclass(slots=True)
class _RunSearch:
    """A search for the largest batch sizes, with its captured traces and guessed outcomes."""

    replays: TargetReplays
    all_limits: Sequence[MemoryLimits]
    _traces: dict[int, Trace] = field(default_factory=dict)
    _outcomes: dict[int, Outcome] = field(default_factory=dict)  # of captured batch sizes
    _programs: dict[tuple[int, ...], Program | None] = field(default_factory=dict)  # by batch sizes
    _guesses: dict[tuple[int, int], Outcome] = field(default_factory=dict)  # by program and batch size
    _is_felt: bool = True  # whether the alignment of a batch size may change the memory

    def find(self) -> Search:
        """Find the largest batch sizes by guesses from fitted traces, and confirm the answers by captures."""
        limit = self.replays.limit
        if self.all_limits[0].allocator_limit_bytes is None:
            return self._by_runs(Search(limit, limit, None, ()))
        self._run(min(first_run(self.replays.is_compiled), limit))
        if not self.replays.is_compiled and limit >= FIT_BATCHES[1]:
            with suppress(ModelError):  # the model's step may refuse this batch size
                self._run(FIT_BATCHES[1])  # captured already by the failed fit of a program
        search = self._search(None)
        for _ in range(_MOST_RUNS):
            batch = self._undecided(search)
            if batch is None:  # decided near the last guesses; larger batch sizes may still fit
                search = _larger(search, self._search(None))
                batch = self._undecided(search)
            if batch is None:
                return search_of(self._outcomes, search.largest, search.comfortable)
            self._run(batch)
            if batch in self.replays.too_large:
                break
            search = self._search(search)
        return self._by_runs(search)

    def _run(self, batch: int) -> None:
        """Capture a batch size, and record its outcome and, if it is not refused, its trace."""
        self._outcomes[batch] = self.replays.outcome_under_limits(batch, self.all_limits)
        if self.replays.is_refused(batch):
            return
        trace = self.replays.trace(batch)
        self._limit_events(trace)
        if self.replays.is_compiled and self._is_felt and self._traces:
            self._is_felt = not self._is_foretold(trace)
        self._traces[batch] = trace

    def _limit_events(self, trace: Trace) -> None:
        """Limit the search to batch sizes whose traces have at most _MOST_EVENTS events.

        If a step works through its batch in parts, its events grow with the batch size. The events of larger
        batches are extrapolated from `trace` and the captured trace nearest to it. Batch sizes up to the
        largest captured one stay within the limit.
        """
        if not self._traces:
            return
        nearest = self._traces[min(self._traces, key=_distance_from(trace.batch))]
        low, high = sorted((nearest, trace), key=lambda one: one.batch)
        more = len(high.events) - len(low.events)
        if more <= 0:
            return
        further = (_MOST_EVENTS - len(high.events)) * (high.batch - low.batch) // more
        limit = max(high.batch + further, *self._outcomes)
        if limit < self.replays.limit:
            self.replays.limit = limit
            self.replays.too_large[limit + 1] = (
                f"the loop works through its batch in parts, and its trace has more than {_MOST_EVENTS:,} "
                "events; planner estimate plans such a batch, which may take minutes"
            )

    def _is_foretold(self, trace: Trace) -> bool:
        """Return whether the nearest captured trace predicts the bytes of `trace`.

        The batch sizes of the two traces must differ in alignment. Returns False if they have the same
        alignment, or if the nearest trace is too far away to predict the bytes.
        """
        nearest = min(self._traces, key=_distance_from(trace.batch))
        low, high = sorted((nearest, trace.batch))
        if gcd(low, _ALIGNED) == gcd(high, _ALIGNED) or high > _NEAR * low:
            return False
        program = self._fitted(nearest)
        assert program is not None
        expected, taken = _allocated_bytes(program.instantiate(trace.batch)), _allocated_bytes(trace)
        return abs(taken - expected) <= _FELT * expected

    def _undecided(self, search: Search) -> int | None:
        """Return the batch size to capture next to decide a search's answers, or None if they are decided."""
        without_retries, any_fit = (Outcome.FITS,), (Outcome.FITS, Outcome.FITS_WITH_RETRIES)
        for answer, outcomes in ((search.comfortable, without_retries), (search.largest, any_fit)):
            if answer and answer not in self._outcomes:
                return answer
            above = answer + (self._unit if self._is_large(answer) else 1)
            is_open = above <= self.replays.limit and above not in self._outcomes
            if is_open and not (self.replays.is_compiled and self._is_ruled_out(above, outcomes)):
                return above
        return None

    def _is_ruled_out(self, batch: int, outcomes: Container[Outcome]) -> bool:
        """Return whether a run can be skipped, since the batch size's predicted outcome is not in `outcomes`.

        A program fitted to two traces predicts the outcome, or else the trace of the batch size just below.
        Returns False if there is neither.
        """
        by_distance = sorted(self._traces, key=_distance_from(batch))
        fit = self._fit_of_two(self._alike(batch)) or self._fit_of_two(by_distance)
        if fit is None and batch - by_distance[0] not in (1, self._unit):
            return False
        program, nearest = fit or (self._fitted(by_distance[0]), by_distance[0])
        assert program is not None
        return self._replayed(program, nearest, batch) not in outcomes

    def _search(self, before: Search | None) -> Search:
        """Search for the largest batch sizes by captured outcomes and by guesses.

        The search begins near the answers of the search `before`, if it is not None.
        """
        limit, unit = min(self.replays.limit, _MOST_STRETCH * max(self._traces)), self._unit

        def outcome(units: int) -> Outcome:
            return self._guess(units * unit)

        if before is None:
            search = largest(outcome, limit // unit)
        else:
            guesses = before.comfortable // unit, before.largest // unit
            search = largest_near(outcome, guesses, limit // unit)
        if len(self._traces) == 1:  # the guess from one trace is rough
            return Search(search.largest * unit, search.comfortable * unit, None, ())
        comfortable = self._largest_within_unit(search.comfortable * unit, limit, (Outcome.FITS,))
        fitting = (Outcome.FITS, Outcome.FITS_WITH_RETRIES)
        best = self._largest_within_unit(search.largest * unit, limit, fitting)
        return Search(max(comfortable, best), comfortable, None, ())

    @property
    def _unit(self) -> int:
        is_aligned = self._is_felt or self._is_large(max(self._traces))
        return _ALIGNED if self.replays.is_compiled and is_aligned else 1

    def _is_large(self, batch: int) -> bool:
        return self.replays.is_compiled and batch >= _ALIGNED_ALONE

    def _largest_within_unit(self, batch: int, limit: int, outcomes: tuple[Outcome, ...]) -> int:
        """Return the largest batch size below the next multiple of `_unit` with an outcome in `outcomes`.

        Outcomes of batch sizes that were not captured are guessed. `batch`, a multiple of `_unit`, is
        returned if no batch size above it has such an outcome, or if `batch` is large.
        """
        if self._is_large(batch):
            return batch
        above = range(min(batch + self._unit - 1, limit), batch, -1)
        return next((size for size in above if self._guess(size) in outcomes), batch)

    def _by_runs(self, near: Search) -> Search:
        """Search by captures alone, starting near the answers of an earlier search."""
        outcome = partial(self.replays.outcome_under_limits, all_limits=self.all_limits)
        search = largest_near(outcome, (near.comfortable, near.largest), self.replays.limit)
        return replace(search, probes=tuple({**self._outcomes, **dict(search.probes)}.items()))

    def _guess(self, batch: int) -> Outcome:
        """Return the outcome of a batch size if it was captured, else a guess from fitted traces."""
        ran = self._outcomes.get(batch)
        if ran is not None:
            return ran
        alike = self._alike(batch)
        program, nearest = self._fit_of_two(alike) or (self._estimated(alike), alike[0])
        assert program is not None
        return self._replayed(program, nearest, batch)

    def _estimated(self, by_distance: Sequence[int]) -> Program | None:
        """Return a rough program from traces of the captured batch sizes, which are given nearest first.

        It is used if no exact program fits. For a compiled job, or if there is one trace, the tensors of the
        nearest trace are scaled in proportion. Otherwise the tensors of the two nearest traces are fitted by
        the site that allocates them.
        """
        nearest, *others = by_distance
        if self.replays.is_compiled or not others:
            return self._fitted(nearest)
        key = nearest, others[0], 0
        if key not in self._programs:
            self._programs[key] = fit_by_site(self._traces[nearest], self._traces[others[0]])
        return self._programs[key]

    def _replayed(self, program: Program, near: int, batch: int) -> Outcome:
        """Replay a program at a batch size, and return the outcome.

        The workspaces of convolutions are asked of the library behind the trace captured at `near`.
        """
        key = id(program), batch
        if key not in self._guesses:
            trace = _with_workspaces(program.instantiate(batch), self._traces[near])
            self._guesses[key] = outcome_under_limits(trace, self.all_limits)
        return self._guesses[key]

    def _alike(self, batch: int) -> list[int]:
        """Return the captured batch sizes aligned like `batch`, or else all of them, the nearest first."""
        aligned = [size for size in self._traces if gcd(size, self._unit) == gcd(batch, self._unit)]
        return sorted(aligned or self._traces, key=_distance_from(batch))

    def _fit_of_two(self, by_distance: Sequence[int]) -> tuple[Program, int] | None:
        """Return a program fitted to two traces, one of them the nearest, with its batch size, or None."""
        nearest, *others = by_distance
        programs = (self._fitted(low, nearest) for low in others)
        return next(((program, nearest) for program in programs if program is not None), None)

    def _fitted(self, *batches: int) -> Program | None:
        if batches not in self._programs:
            traces = [self._traces[size] for size in batches]
            self._programs[batches] = scaled_program(traces[0]) if len(traces) == 1 else _fit(*traces)
        return self._programs[batches]


def _larger(one: Search, other: Search) -> Search:
    largest, comfortable = max(one.largest, other.largest), max(one.comfortable, other.comfortable)
    return Search(largest, comfortable, None, ())


def _allocated_bytes(trace: Trace) -> int:
    """Return the bytes of all blocks that a trace allocates, except convolution workspaces."""
    workspaces = {row.block for row in trace.conv_workspaces}
    allocs = (event for event in trace.events if isinstance(event, Alloc))
    return sum(event.size_bytes for event in allocs if event.block not in workspaces)


def _distance_from(batch: int) -> Callable[[int], tuple[int, int]]:
    return lambda size: (abs(size - batch), size)


def _fit(first: Trace, second: Trace) -> Program | None:
    try:
        return fit_traces(first, second, nearest_affine, nearest_affine)
    except NotAffineError:
        return None


def _with_workspaces(trace: Trace, near: Trace) -> Trace:
    """Return a guessed trace with its convolution workspaces queried at the guessed batch size.

    The library that answered for `near`, a captured trace, is queried about the convolutions of `near`, with
    their samples scaled to the guessed batch size. The trace is returned unchanged if there is no library or
    no workspace.
    """
    ask = near.workspaces_of
    if ask is None or not trace.conv_workspaces:
        return trace
    sizes: dict[int, int] = {}
    rows = []
    for row in trace.conv_workspaces:
        (x, *of_x), (y, *of_y) = row.x, row.y
        x, y = (max(1, samples * trace.batch // near.batch) for samples in (x, y))
        scaled = replace(row, x=(x, *of_x), y=(y, *of_y))
        answer = ask(scaled.convolution)
        sizes[row.block] = max(1, answer.searched_bytes if row.searched else answer.workspace_bytes)
        rows.append(scaled)
    events = tuple(
        replace(event, size_bytes=sizes[event.block])
        if isinstance(event, Alloc) and event.block in sizes
        else event
        for event in trace.events
    )
    return replace(trace, events=events, conv_workspaces=tuple(rows), next_workspaces=near.next_workspaces)
