"""Lower bounds of the memory that a job's tensors take, whatever the allocator does."""

from collections.abc import Callable, Iterable, Sequence

from planner.program.events import Alloc, Event, Free
from planner.program.program import AffineAlloc, ProgramEvent

LowerBound = Callable[[int], int]  # bytes that a batch size takes at the least

_Line = tuple[int, int]  # bytes for each sample, and fixed ones


def live_bytes_bound(events: Iterable[Event | ProgramEvent]) -> LowerBound:
    """Return the most that tensors take at once, as a function of the batch size.

    Rounding, gaps and blocks without which the process can do are not counted. The live bytes after each
    allocation are affine in the batch size; those that are highest somewhere are evaluated.
    """
    sizes: dict[int, _Line] = {}
    slope = fixed = 0
    highest: dict[int, int] = {0: 0}
    for event in events:
        if isinstance(event, Alloc | AffineAlloc):
            size = (0, 0) if event.may_fail else _line(event)
            sizes[event.block] = size
            slope, fixed = slope + size[0], fixed + size[1]
            if slope not in highest or highest[slope] < fixed:
                highest[slope] = fixed
        elif isinstance(event, Free):
            gone = sizes[event.block]
            slope, fixed = slope - gone[0], fixed - gone[1]
    lines = _envelope(sorted(highest.items()))
    return lambda batch: max(fixed + slope * batch for slope, fixed in lines)


def _line(event: Alloc | AffineAlloc) -> _Line:
    if isinstance(event, Alloc):
        return 0, event.size_bytes
    return event.bytes_per_sample, event.fixed_bytes


def _envelope(lines: Sequence[_Line]) -> list[_Line]:
    """Return those lines, by rising slope and no two alike, that are highest at some batch size above 0."""
    hull: list[_Line] = []
    for line in lines:
        while hull and hull[-1][1] <= line[1]:
            hull.pop()  # steeper, and no lower at 0
        while len(hull) > 1 and _is_hidden(hull[-2], hull[-1], line):
            hull.pop()
        hull.append(line)
    return hull


def _is_hidden(low: _Line, middle: _Line, high: _Line) -> bool:
    """Return whether the middle line is nowhere above both others."""
    return (low[1] - high[1]) * (middle[0] - low[0]) <= (low[1] - middle[1]) * (high[0] - low[0])
