"""What the tensors of a trace take at the least, whatever the allocator does: a bound without a replay."""

from collections.abc import Callable, Iterable, Sequence

from planner.program.events import Alloc, Event, Free

Floor = Callable[[int], int]  # bytes that a batch size takes at the least

_Line = tuple[int, int]  # bytes for each sample, and fixed ones


def least_bytes(events: Iterable[Event]) -> Floor:
    """The most that the tensors of an affine trace take at once, without any rounding or gaps, nor
    blocks that the process can do without.

    What lives after each birth is a line in the batch size; those that are highest somewhere are kept.
    """
    sizes: dict[int, _Line] = {}
    slope = fixed = 0
    highest: dict[int, int] = {0: 0}
    for event in events:
        if isinstance(event, Alloc):
            own = (0, 0) if event.optional else (event.per_sample_bytes, event.fixed_bytes)
            sizes[event.block] = own
            slope, fixed = slope + own[0], fixed + own[1]
            if slope not in highest or highest[slope] < fixed:
                highest[slope] = fixed
        elif isinstance(event, Free):
            gone = sizes[event.block]
            slope, fixed = slope - gone[0], fixed - gone[1]
    lines = _envelope(sorted(highest.items()))
    return lambda batch: max(fixed + slope * batch for slope, fixed in lines)


def _envelope(lines: Sequence[_Line]) -> list[_Line]:
    """Of lines by rising slope, no two alike, those that are highest at some batch size above 0."""
    kept: list[_Line] = []
    for line in lines:
        while kept and kept[-1][1] <= line[1]:
            kept.pop()  # steeper, and no lower at 0
        while len(kept) > 1 and _is_hidden(kept[-2], kept[-1], line):
            kept.pop()
        kept.append(line)
    return kept


def _is_hidden(low: _Line, middle: _Line, high: _Line) -> bool:
    """Whether the middle line is nowhere above both others: the outer two meet where it lies below."""
    return (low[1] - high[1]) * (middle[0] - low[0]) <= (low[1] - middle[1]) * (high[0] - low[0])
