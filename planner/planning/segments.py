"""Split a trace or a program into one segment per batch, and find the blocks that outlive their segment.

Variables of a loop (inputs, output, loss, gradients, optimizer state) live from one batch to the next. In
traces of one job at other sizes, a variable has the same category and the same number within the category.
Numbers count from the end of the batch that allocates the variable, since some state is allocated at the
start of one batch alone.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from planner.program import AffineAlloc, Alloc, Category, Event, Free, Phase, PhaseStart, ProgramEvent

Variable = tuple[Category, int]  # of a block that outlives its segment; numbers count from the end
_Event = TypeVar("_Event", Event, ProgramEvent)


class Segment(Struct, Generic[_Event], frozen=True):
    """The events of one batch, from copying its inputs to copying the next inputs.

    The first segment is the set-up.
    """

    step: int
    start: int  # index of its first event
    events: list[_Event]


def split_segments(events: Iterable[_Event]) -> list[Segment[_Event]]:
    """Return the segments of a trace or program, without the phase that marks its end."""
    segments: list[Segment[_Event]] = [Segment(0, 0, [])]
    for index, event in enumerate(events):
        if isinstance(event, PhaseStart):
            if event.phase is Phase.INPUTS or event.step > segments[-1].step:
                segments.append(Segment(event.step, index, []))
            if event.phase is Phase.END:
                continue
        segments[-1].events.append(event)
    return segments


def find_variables(segments: Sequence[Segment[_Event]]) -> dict[int, tuple[int, Variable]]:
    """Return the blocks that outlive their segment, each with the segment's index and the variable."""
    variables: dict[int, tuple[int, Variable]] = {}
    for index, segment in enumerate(segments):
        freed = {event.block for event in segment.events if isinstance(event, Free)}
        counts: Counter[Category] = Counter()
        for event in reversed(segment.events):
            if isinstance(event, Alloc | AffineAlloc) and event.block not in freed:
                variables[event.block] = index, (event.category, counts[event.category])
                counts[event.category] += 1
    return variables
