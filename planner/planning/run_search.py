"""The largest batch sizes of a job each trace of which is a run of the model that takes seconds.

Such are compiled models, which inductor compiles anew for each batch size. The traces of batch sizes that ran
are fitted to a program for those near them; its replays tell which batch size to run next, until the answers
ran. So no answer is a guess. The batch size after an answer runs as well; a compiled one is ruled out by
what ran: by a fit of two traces, else by the trace of the answer with its tensors in proportion.

inductor times products with padded operands where a size is no multiple of 16 bytes, which takes memory
(`planner.capture.inductor.padding`). So compiled batch sizes are fitted by the power of two that divides
them, multiples of eight are searched first, and those beside the answer last, until a run of another
alignment shows that a model does not feel it. Padding only takes more, so a batch size of any alignment is
ruled out by what its neighbour takes. Large compiled batch sizes are multiples of eight alone: the others
beside them are less than a hundredth more.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import gcd

from msgspec.structs import replace

from planner.allocator import MemoryLimits, replay_in_rooms, replay_trace
from planner.errors import ModelError
from planner.planning.replays import TargetReplays
from planner.planning.search import Search, largest, largest_near
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
_MOST_STRETCH = 128  # a trace is not followed beyond so many times its batch size
_FELT = 0.03  # of the bytes that a trace allocates, by which padding shows
_NEAR = 1.5  # times a batch size, within which a trace in proportion tells those bytes
_ALIGNED_ALONE = 1024  # the compiled batch size from which multiples of eight alone are tried
_MOST_RUNS = 12  # by guesses, after which runs alone lead on


def first_run(is_compiled: bool) -> int:
    """Return the batch size that runs first: of programs that did not fit, one whose run is there."""
    return _FIRST_COMPILED if is_compiled else FIT_BATCHES[0]


def note_on_runs(search: Search, is_compiled: bool) -> str:
    """Return a note on which batch sizes ran."""
    sizes = ", ".join(map(str, sorted(size for size, _ in search.probes)))
    traced = f"batch sizes {sizes} were traced; that no larger one fits is taken from these traces"
    if not is_compiled or search.largest < _ALIGNED_ALONE:
        return traced
    return f"{traced}; from {_ALIGNED_ALONE} on multiples of {_ALIGNED} alone were tried"


def search_by_runs(replays: TargetReplays, rooms: Sequence[MemoryLimits]) -> Search:
    """Return the largest batch sizes, without retries and of any that fit in all rooms.

    The answers ran, and so did the batch sizes after them; traces alone may rule out compiled ones. Raises
    the errors of a capture.
    """
    return _RunSearch(replays, rooms).find()


@dataclass(slots=True)
class _RunSearch:
    replays: TargetReplays
    rooms: Sequence[MemoryLimits]
    _traces: dict[int, Trace] = field(default_factory=dict)
    _outcomes: dict[int, Outcome] = field(default_factory=dict)  # of batch sizes that ran
    _programs: dict[tuple[int, ...], Program | None] = field(default_factory=dict)  # by batch sizes
    _guesses: dict[tuple[int, int], Outcome] = field(default_factory=dict)  # by program and batch size
    _is_felt: bool = True  # the alignment of a batch size

    def find(self) -> Search:
        """Search by guesses that runs confirm."""
        limit = self.replays.limit
        if self.rooms[0].allocator_limit_bytes is None:
            return self._by_runs(Search(limit, limit, None, ()))
        self._run(min(first_run(self.replays.is_compiled), limit))
        if not self.replays.is_compiled and limit >= FIT_BATCHES[1]:
            with suppress(ModelError):  # which its step may refuse
                self._run(FIT_BATCHES[1])  # which ran as well, for a program
        search = self._search(None)
        for _ in range(_MOST_RUNS):
            batch = self._undecided(search)
            if batch is None:  # near the last guesses; larger ones may fit all the same
                search = _larger(search, self._search(None))
                batch = self._undecided(search)
            if batch is None:
                failures = [size for size, own in self._outcomes.items() if own is Outcome.DOES_NOT_FIT]
                probes = tuple(self._outcomes.items())
                return replace(search, first_failure=min(failures, default=None), probes=probes)
            self._run(batch)
            if batch in self.replays.too_large:
                break
            search = self._search(search)
        return self._by_runs(search)

    def _run(self, batch: int) -> None:
        """Run a batch size, whose trace serves the guesses at others."""
        self._outcomes[batch] = self.replays.outcome_in_rooms(batch, self.rooms)
        if self.replays.is_refused(batch):
            return
        trace = self.replays.trace(batch)
        if self.replays.is_compiled and self._is_felt and self._traces:
            self._is_felt = not self._is_foretold(trace)
        self._traces[batch] = trace

    def _is_foretold(self, trace: Trace) -> bool:
        """Return whether the nearest trace, which is aligned otherwise, tells how much is allocated."""
        nearest = min(self._traces, key=_distance_from(trace.batch))
        low, high = sorted((nearest, trace.batch))
        if gcd(low, _ALIGNED) == gcd(high, _ALIGNED) or high > _NEAR * low:
            return False
        program = self._fitted(nearest)
        assert program is not None
        expected, taken = _allocated_bytes(program.instantiate(trace.batch)), _allocated_bytes(trace)
        return abs(taken - expected) <= _FELT * expected

    def _undecided(self, search: Search) -> int | None:
        """Return a batch size that decides the answer and did not run; None: all did."""
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
        """Return whether traces say that a batch size has none of these outcomes: two that fit to a program,
        or that of the answer just before it.
        """
        by_distance = sorted(self._traces, key=_distance_from(batch))
        fit = self._fit_of_two(self._alike(batch)) or self._fit_of_two(by_distance)
        if fit is None and batch - by_distance[0] not in (1, self._unit):
            return False
        program, nearest = fit or (self._fitted(by_distance[0]), by_distance[0])
        assert program is not None
        return self._replayed(program, nearest, batch) not in outcomes

    def _search(self, before: Search | None) -> Search:
        """Search by what ran and what fitted traces say of the rest; near an earlier search."""
        limit, unit = min(self.replays.limit, _MOST_STRETCH * max(self._traces)), self._unit

        def outcome(units: int) -> Outcome:
            return self._guess(units * unit)

        if before is None:
            search = largest(outcome, limit // unit)
        else:
            guesses = before.comfortable // unit, before.largest // unit
            search = largest_near(outcome, guesses, limit // unit)
        if len(self._traces) == 1:  # the guess is rough
            return Search(search.largest * unit, search.comfortable * unit, None, ())
        comfortable = self._beside(search.comfortable * unit, limit, (Outcome.FITS,))
        best = self._beside(search.largest * unit, limit, (Outcome.FITS, Outcome.FITS_WITH_RETRIES))
        return Search(max(comfortable, best), comfortable, None, ())

    @property
    def _unit(self) -> int:
        is_aligned = self._is_felt or self._is_large(max(self._traces))
        return _ALIGNED if self.replays.is_compiled and is_aligned else 1

    def _is_large(self, batch: int) -> bool:
        return self.replays.is_compiled and batch >= _ALIGNED_ALONE

    def _beside(self, batch: int, limit: int, outcomes: tuple[Outcome, ...]) -> int:
        """Return the largest batch size with such an outcome from a multiple of the unit to the next one."""
        if self._is_large(batch):
            return batch
        above = range(min(batch + self._unit - 1, limit), batch, -1)
        return next((size for size in above if self._guess(size) in outcomes), batch)

    def _by_runs(self, near: Search) -> Search:
        """Search by runs alone, from where guesses led."""
        outcome = partial(self.replays.outcome_in_rooms, rooms=self.rooms)
        search = largest_near(outcome, (near.comfortable, near.largest), self.replays.limit)
        return replace(search, probes=tuple({**self._outcomes, **dict(search.probes)}.items()))

    def _guess(self, batch: int) -> Outcome:
        """Return the outcome of a run where there was one, else of a replay of fitted traces."""
        ran = self._outcomes.get(batch)
        if ran is not None:
            return ran
        alike = self._alike(batch)
        program, nearest = self._fit_of_two(alike) or (self._estimated(alike), alike[0])
        assert program is not None
        return self._replayed(program, nearest, batch)

    def _estimated(self, by_distance: Sequence[int]) -> Program | None:
        """Return the program of the nearest batch size, of its tensors in proportion or as another one's."""
        nearest, *others = by_distance
        if self.replays.is_compiled or not others:
            return self._fitted(nearest)
        key = nearest, others[0], 0
        if key not in self._programs:
            self._programs[key] = fit_by_site(self._traces[nearest], self._traces[others[0]])
        return self._programs[key]

    def _replayed(self, program: Program, near: int, batch: int) -> Outcome:
        """Return the outcome by a program, with the workspaces that the library of a run's trace answers."""
        key = id(program), batch
        if key not in self._guesses:
            trace = _with_workspaces(program.instantiate(batch), self._traces[near])
            self._guesses[key] = _outcome(trace, self.rooms)
        return self._guesses[key]

    def _alike(self, batch: int) -> list[int]:
        """Return the batch sizes that ran, the nearest first; those that are aligned alike, if any."""
        aligned = [size for size in self._traces if gcd(size, self._unit) == gcd(batch, self._unit)]
        return sorted(aligned or self._traces, key=_distance_from(batch))

    def _fit_of_two(self, by_distance: Sequence[int]) -> tuple[Program, int] | None:
        """Return the program of the nearest batch size and another one, and the nearest, if any two fit."""
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
    """Return the bytes of all blocks together, apart from workspaces of convolutions."""
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


def _outcome(trace: Trace, rooms: Sequence[MemoryLimits]) -> Outcome:
    outcome = replay_trace(trace, rooms[0]).outcome
    if outcome is not Outcome.FITS_WITH_RETRIES:
        return outcome
    larger = replay_in_rooms(rooms[1:], partial(replay_trace, trace))
    fits = all(run.outcome is not Outcome.DOES_NOT_FIT for _, run in larger)
    return outcome if fits else Outcome.DOES_NOT_FIT


def _with_workspaces(trace: Trace, near: Trace) -> Trace:
    """Return a guessed trace with the workspaces of convolutions that the library of a run's trace answers.

    Its convolutions are those of the run, whose samples are so many more or fewer.
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
