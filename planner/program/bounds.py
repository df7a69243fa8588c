"""Lower bounds of the memory that a job's tensors take under any allocator."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from planner.program.events import Alloc, Event, Free
from planner.program.program import AffineAlloc, ProgramEvent

LowerBound = Callable[[int], int]  # maps a batch size to the fewest bytes that the job takes at it

_Line = tuple[int, int]  # bytes per sample, fixed bytes
_Curve = tuple[int, int, int]  # bytes per pair of samples, bytes per sample, fixed bytes


def live_bytes_bound(events: Iterable[Event | ProgramEvent], unit: int = 1) -> LowerBound:
    """Return a function from a batch size to a lower bound of memory: the peak bytes of live blocks.

    The events' sizes count the batch in steps of `unit` samples. Rounding, gaps and optional blocks
    (`may_fail`) are not counted. The live bytes after each allocation are a polynomial in the batch size;
    polynomials below another polynomial at every batch size are skipped.
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
    """Yield the live bytes after each allocation, as coefficients of a polynomial in the batch size."""
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
    """Return the lines that are highest at some batch size above 0.

    `lines` have distinct slopes in ascending order.
    """
    hull: list[_Line] = []
    for line in lines:
        while hull and hull[-1][1] <= line[1]:
            hull.pop()  # the new line is steeper, and not lower at batch size 0
        while len(hull) > 1 and _is_hidden(hull[-2], hull[-1], line):
            hull.pop()
        hull.append(line)
    return hull


def _is_hidden(low: _Line, middle: _Line, high: _Line) -> bool:
    """Return whether the middle of three lines, sorted by slope, is nowhere above both others."""
    return (low[1] - high[1]) * (middle[0] - low[0]) <= (low[1] - middle[1]) * (high[0] - low[0])
