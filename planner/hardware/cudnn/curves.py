"""The workspace of a convolution as a piecewise linear function of the batch size."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

_SMALL_BYTES = 2**18

# Batch sizes in ascending order, and the workspace in bytes at each batch size.
Curve = tuple[tuple[int, ...], tuple[int, ...]]


def value_at(curve: Curve, batch: int) -> int:
    """Return the workspace in bytes at a batch size, interpolated or extrapolated linearly.

    A curve that falls at the upper end is constant beyond the end, and no result is negative.

    >>> value_at(((2, 4), (10, 20)), 3), value_at(((2, 4), (10, 20)), 8), value_at(((2,), (7,)), 64)
    (15, 40, 7)
    """
    batches, values = curve
    if len(batches) == 1:
        return values[0]
    place = min(max(bisect_right(batches, batch), 1), len(batches) - 1)
    low, high = batches[place - 1], batches[place]
    below, above = values[place - 1], values[place]
    if batch > high and above < below:  # a line that falls does not go on falling
        return above
    return max(below + (above - below) * (batch - low) // (high - low), 0)


def fit_curve(workspace_bytes: Callable[[int], int], batches: Sequence[int]) -> Curve:
    """Return a piecewise linear curve of the workspace, evaluated at `batches` and refined between them.

    A step is located to one part in 64 of its batch size.
    """
    known = {batch: workspace_bytes(batch) for batch in batches}

    def refine(low: int, high: int) -> None:
        middle = (low + high) // 2
        if middle == low or (high - low) * 64 < high:
            return
        known[middle] = workspace_bytes(middle)
        if not _is_near(_between(known, low, high, middle), known[middle]):
            refine(low, middle)
            refine(middle, high)

    for low, high in zip(batches, batches[1:], strict=False):
        refine(low, high)
    knots = _without_needless(sorted(known.items()))
    return tuple(batch for batch, _ in knots), tuple(size for _, size in knots)


def _between(known: Mapping[int, int], low: int, high: int, batch: int) -> int:
    return known[low] + (known[high] - known[low]) * (batch - low) // (high - low)


def _is_near(expected: int, true: int) -> bool:
    """Return whether two workspaces are nearly equal in size.

    The allocator hardly distinguishes such workspaces.
    """
    return abs(expected - true) <= (_SMALL_BYTES if max(expected, true) < _SMALL_BYTES else 4096)


def _without_needless(knots: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Remove the points of a curve that linear interpolation nearly reproduces, and return the rest.

    A point is removed if it is near the line between its remaining neighbours. A flat curve keeps only the
    first point.
    """
    known = dict(knots)
    kept, place = [knots[0]], 0
    while place < len(knots) - 1:
        end = place + 1
        for candidate in range(place + 2, len(knots)):
            low, high = knots[place][0], knots[candidate][0]
            inner = (knots[other][0] for other in range(place + 1, candidate))
            if not all(_is_near(_between(known, low, high, batch), known[batch]) for batch in inner):
                break
            end = candidate
        kept.append(knots[end])
        place = end
    is_flat = len(kept) == 2 and _is_near(kept[0][1], kept[1][1])
    return kept[:1] if is_flat else kept
