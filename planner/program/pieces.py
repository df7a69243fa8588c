"""Cut traces and programs into one piece per batch, and join pieces into one run.

The pieces can be joined in any order. A piece begins with the copy of a batch's inputs and ends before the
copy of the next inputs; the first piece is the set-up. A block that outlives its piece holds a variable of
the loop: inputs, output, loss, gradients, or optimizer state. In traces of one job at different sizes, a
variable has the same category and the same number within the category. Numbers count from the end of the
piece that allocates the variable, since some state is allocated at the start of one batch alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Trace
from planner.program.program import AffineAlloc, KernelWorkspaces, Program, ProgramEvent

Variable = tuple[Category, int]  # category and number of a block that outlives its piece
_Event = TypeVar("_Event", Event, ProgramEvent)
# By block: the index of the piece that allocates it, and its variable.
_Born = Mapping[int, tuple[int, Variable]]

FIRST_LASTING = 2**40  # first number of joined blocks that outlive their piece; others keep their numbers


class NotJoinedError(Exception):
    """Raised when a joined piece frees a variable that is not alive."""


class Piece(Struct, frozen=True):
    """The events of one batch, with the indices of events whose blocks span several batches."""

    trace: Trace
    lasting: tuple[tuple[int, Variable], ...]  # index and variable of each allocation that outlives the batch
    # Index, age and variable of each free of an earlier piece's block. The age is the number of pieces since
    # the allocation, or -1 if the set-up allocated the block.
    freed: tuple[tuple[int, int, Variable], ...]
    starts: tuple[int, ...]  # indices of starts of phases


class ProgramPiece(Struct, frozen=True):
    """The part of a program that covers one batch."""

    index: int
    program: Program
    born: _Born

    def at(self, batch: int, workspaces: KernelWorkspaces) -> Piece:
        """Return the piece at a batch size, with the given workspaces of kernels."""
        return _piece(self.index, self.program.instantiate(batch, workspaces), self.born)


class _Segment(Struct, Generic[_Event], frozen=True):
    """The events of one piece, before their blocks are matched to variables."""

    step: int
    start: int  # index of its first event
    events: list[_Event]


def cut_trace(trace: Trace) -> list[list[Piece]]:
    """Cut a trace, except its phase END, into lists of pieces, one for each step from 0, the set-up."""
    segments = _split(trace.events)
    born, whole = _find_variables(segments), replace(trace, convolutions=trace.convolution_by_block())
    steps: list[list[Piece]] = [[] for _ in range(segments[-1].step + 1)]
    for index, segment in enumerate(segments):
        steps[segment.step].append(_piece(index, replace(whole, events=tuple(segment.events)), born))
    return steps


def cut_program(program: Program) -> list[list[ProgramPiece]]:
    """Cut a program, except its phase END, into lists of pieces, one for each step from 0, the set-up."""
    segments = _split(program.events)
    born = _find_variables(segments)
    ends = [segment.start for segment in segments[1:]] + [len(program.events)]
    steps: list[list[ProgramPiece]] = [[] for _ in range(segments[-1].step + 1)]
    for index, (segment, end) in enumerate(zip(segments, ends, strict=True)):
        start = segment.start if index else -1  # a call positioned at the first event runs before it
        calls = tuple(
            replace(call, position=call.position - segment.start)
            for call in program.calls
            if start < call.position <= end
        )
        own = Program(tuple(segment.events), program.sites, calls, unknown_ops=program.unknown_ops)
        steps[segment.step].append(ProgramPiece(index, own, born))
    return steps


def is_periodic(steps: Sequence[Sequence[Piece]]) -> bool:
    """Return whether the last two steps have equal requests, frees and phases.

    False if fewer than two steps follow the set-up.
    """
    return len(steps) > 2 and [*map(_requests, steps[-1])] == [*map(_requests, steps[-2])]


def first_step(trace: Trace) -> Trace:
    """Return the trace with only the set-up and the first step."""
    starts = ((index, event) for index, event in enumerate(trace.events) if isinstance(event, PhaseStart))
    ends = (index for index, start in starts if start.step > 1 or start.phase is Phase.END)
    return replace(trace, events=trace.events[: next(ends, len(trace.events))])


class Joiner:
    """A joiner of pieces to one run, which tracks the live block of each variable."""

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        """Create a joiner that has joined no piece.

        The first piece to be joined is the set-up. `numbers` yields the numbers for the blocks of variables;
        by default, they count from `FIRST_LASTING`.
        """
        # Block by the index of the piece that allocated it, and its variable.
        self.live: dict[tuple[int, Variable], int] = {}
        self.index = -1  # index of the last joined piece
        self._numbers = count(FIRST_LASTING) if numbers is None else numbers

    def join(self, piece: Piece, step: int) -> Trace:
        """Renumber the blocks of a piece to continue the earlier pieces, and return its trace.

        The piece becomes step `step`. Raises NotJoinedError if the piece frees a variable that is not alive.
        """
        self.index += 1
        events: list[Event] = [*piece.trace.events]
        for index, variable in piece.lasting:
            block = self.live[self.index, variable] = next(self._numbers)
            events[index] = replace(events[index], block=block)
        for index, age, variable in piece.freed:
            freed = self.live.pop((0 if age < 0 else self.index - age, variable), None)
            if freed is None:
                raise NotJoinedError
            events[index] = replace(events[index], block=freed)
        for index in piece.starts:
            events[index] = replace(events[index], step=step)
        return replace(piece.trace, events=tuple(events))

    def copy(self) -> "Joiner":
        """Return a copy with the same live blocks. Both take new block numbers from one counter."""
        twin = Joiner(self._numbers)
        twin.live, twin.index = dict(self.live), self.index
        return twin


def _split(events: Iterable[_Event]) -> list[_Segment[_Event]]:
    segments: list[_Segment[_Event]] = [_Segment(0, 0, [])]
    for index, event in enumerate(events):
        if isinstance(event, PhaseStart):
            if event.phase is Phase.INPUTS or event.step > segments[-1].step:
                segments.append(_Segment(event.step, index, []))
            if event.phase is Phase.END:
                continue
        segments[-1].events.append(event)
    return segments


def _find_variables(segments: Sequence[_Segment[_Event]]) -> _Born:
    born: dict[int, tuple[int, Variable]] = {}
    for index, segment in enumerate(segments):
        freed = {event.block for event in segment.events if isinstance(event, Free)}
        counts: Counter[Category] = Counter()
        for event in reversed(segment.events):
            if isinstance(event, Alloc | AffineAlloc) and event.block not in freed:
                born[event.block] = index, (event.category, counts[event.category])
                counts[event.category] += 1
    return born


def _piece(index: int, trace: Trace, born: _Born) -> Piece:
    lasting, freed, starts = [], [], []
    for place, event in enumerate(trace.events):
        if isinstance(event, PhaseStart):
            starts.append(place)
        elif event.block in born:  # true also of a workspace whose number equals a later batch's block
            since, variable = born[event.block]
            if isinstance(event, Alloc):
                if since == index:
                    lasting.append((place, variable))
            elif since < index:
                freed.append((place, index - since if since else -1, variable))
    return Piece(trace, tuple(lasting), tuple(freed), tuple(starts))


def _requests(piece: Piece) -> list[object]:
    """Return the requests, frees and phases of a piece. Blocks are named by their order or variable."""
    variables = dict(piece.lasting) | {index: (age, variable) for index, age, variable in piece.freed}
    order: dict[int, int] = {}
    requests: list[object] = []
    for index, event in enumerate(piece.trace.events):
        variable = variables.get(index)
        if isinstance(event, Alloc):
            order[event.block] = index
            requests.append((event.size_bytes, event.category, event.may_fail, event.stream, variable))
        elif isinstance(event, Free):
            requests.append((variable or order[event.block], event.empties_cache))
        else:
            requests.append(event.phase)
    return requests
