"""The largest batch sizes of a job each trace of which is a run of the model that takes seconds.

Such are compiled models, which inductor compiles anew for each batch size. The traces of batch sizes that ran
are fitted to a program for those near them; its replays tell which batch size to run next, until the answers
and their successors ran. So nothing that is answered is a guess: only batch sizes farther above, which a
search of a program would also probe, are ruled out by fitted traces alone.

inductor times products with padded operands where a size is no multiple of 16 bytes, which takes memory
(`planner.capture.inductor.padding`). So compiled batch sizes are fitted by the power of two that divides
them, multiples of eight are searched first, and those beside the answer last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd

from msgspec.structs import replace

from planner.allocator import MemoryLimits, replay_in_rooms, replay_trace
from planner.planning.replays import TargetReplays
from planner.planning.search import Search, largest, largest_near
from planner.program import (
    FIT_BATCHES,
    Alloc,
    NotAffineError,
    Outcome,
    Program,
    Trace,
    fit_traces,
    nearest_affine,
    scaled_program,
)

_FIRST_COMPILED = 32
_ALIGNED = 8  # values of the smallest type that 16 bytes hold
_MOST_STRETCH = 64  # a trace is not followed beyond so many times its batch size
_MOST_RUNS = 12  # by guesses, after which runs alone lead on


def first_run(is_compiled: bool) -> int:
    """Return the batch size that runs first: of programs that did not fit, one whose run is there."""
    return _FIRST_COMPILED if is_compiled else FIT_BATCHES[0]


def note_on_runs(search: Search) -> str:
    """Return a note on which batch sizes ran."""
    sizes = ", ".join(map(str, sorted(size for size, _ in search.probes)))
    return f"batch sizes {sizes} were traced; that no larger one fits is taken from these traces"


def search_by_runs(replays: TargetReplays, rooms: Sequence[MemoryLimits]) -> Search:
    """Return the largest batch sizes, without retries and of any that fit in all rooms.

    The answers and their successors ran. Raises the errors of a capture.
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

    def find(self) -> Search:
        """Search by guesses that runs confirm."""
        limit = self.replays.limit
        if self.rooms[0].allocator_limit_bytes is None:
            return self._by_runs(Search(limit, limit, None, ()))
        self._run(min(first_run(self.replays.is_compiled), limit))
        search = self._search(None)
        for _ in range(_MOST_RUNS):
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
        if batch not in self.replays.too_large:
            self._traces[batch] = self.replays.trace(batch)

    def _undecided(self, search: Search) -> int | None:
        """Return a batch size that decides the answer and did not run; None: all did."""
        comfortable, best = search.comfortable, search.largest
        deciding = (comfortable, comfortable + 1, best, best + 1)
        most = self.replays.limit
        return next((size for size in deciding if 0 < size <= most and size not in self._outcomes), None)

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
        return _ALIGNED if self.replays.is_compiled else 1

    def _beside(self, batch: int, limit: int, outcomes: tuple[Outcome, ...]) -> int:
        """Return the largest batch size with such an outcome from a multiple of the unit to the next one."""
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
        program = self._program(batch)
        key = id(program), batch
        if key not in self._guesses:
            near = self._traces[self._by_distance(batch)[0]]
            self._guesses[key] = _outcome(_with_workspaces(program.instantiate(batch), near), self.rooms)
        return self._guesses[key]

    def _by_distance(self, batch: int) -> list[int]:
        """Return the batch sizes that ran, the nearest first; those that are aligned alike, if any."""
        aligned = [size for size in self._traces if gcd(size, self._unit) == gcd(batch, self._unit)]
        return sorted(aligned or self._traces, key=lambda size: (abs(size - batch), size))

    def _program(self, batch: int) -> Program:
        """Return the program of the traces that are nearest to a batch size, of two if they fit."""
        nearest, *others = self._by_distance(batch)
        for low in others:
            program = self._fitted(low, nearest)
            if program is not None:
                return program
        program = self._fitted(nearest)
        assert program is not None
        return program

    def _fitted(self, *batches: int) -> Program | None:
        if batches not in self._programs:
            traces = [self._traces[size] for size in batches]
            self._programs[batches] = scaled_program(traces[0]) if len(traces) == 1 else _fit(*traces)
        return self._programs[batches]


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
