"""Lower bounds of the memory that a job's tensors take, whatever the allocator does."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from planner.program.events import Alloc, Event, Free
from planner.program.program import AffineAlloc, ProgramEvent

LowerBound = Callable[[int], int]  # bytes that a batch size takes at the least

_Line = tuple[int, int]  # bytes for each sample, and fixed ones
_Curve = tuple[int, int, int]  # bytes for each pair of samples, for each sample, and fixed ones


def live_bytes_bound(events: Iterable[Event | ProgramEvent], unit: int = 1) -> LowerBound:
    """Return the most that tensors take at once, as a function of the batch size; sizes are in such units.

    Rounding, gaps and blocks without which the process can do are not counted. The live bytes after each
    allocation are a polynomial in the batch size; those that are highest somewhere are evaluated.
    """
    curves = {(0, 0, 0): None} | dict.fromkeys(_live_curves(events))
    if not any(pair for pair, _, _ in curves):
        lines = _envelope(sorted({slope: fixed for _, slope, fixed in sorted(curves)}.items()))
        return lambda batch: max(fixed + slope * (batch // unit) for slope, fixed in lines)
    highest: list[_Curve] = [one for one in curves if not any(_is_above(other, one) for other in curves)]

    def bound(batch: int) -> int:
        units = batch // unit
        return max(fixed + (slope + pair * units) * units for pair, slope, fixed in highest)

    return bound


def _live_curves(events: Iterable[Event | ProgramEvent]) -> Iterator[_Curve]:
    """Yield the live bytes after each allocation."""
    sizes: dict[int, _Curve] = {}
    live: _Curve = 0, 0, 0
    for event in events:
        if isinstance(event, Alloc | AffineAlloc):
            size = sizes[event.block] = (0, 0, 0) if event.may_fail else _curve(event)
            live = live[0] + size[0], live[1] + size[1], live[2] + size[2]
            yield live
        elif isinstance(event, Free):
            gone = sizes[event.block]
            live = live[0] - gone[0], live[1] - gone[1], live[2] - gone[2]


def _curve(event: Alloc | AffineAlloc) -> _Curve:
    if isinstance(event, Alloc):
        return 0, 0, event.size_bytes
    return event.bytes_per_pair, event.bytes_per_sample, event.fixed_bytes


def _is_above(one: _Curve, other: _Curve) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


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
