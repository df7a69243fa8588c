"""Find the stored convolutions that are most similar to an unknown convolution.

Workspaces are mostly copies of the operands, and the workspaces of similar convolutions are equally many
copies. Some convolutions get a special engine, whose workspace is dozens of copies. So the median of
the workspaces of the nearest three convolutions is taken: two of the three have to agree on a large size.
"""

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from math import log2, prod
from typing import NamedTuple

from planner.hardware.cudnn.keys import convolution_of

LENDERS = 3
_WIDEST = 8


class Operands(NamedTuple):
    """The numbers of elements of a convolution's operands, with input and output for one sample."""

    per_sample: int  # of input and output
    weight: int

    def count(self, batch: int) -> int:
        """Return the number of elements of all operands at a batch size."""
        return self.per_sample * batch + self.weight


class Candidate(NamedTuple):
    """A stored convolution for comparison, with its index, features and operand sizes."""

    place: int  # index of its key
    features: tuple[float, ...]
    operands: Operands


class Similar(NamedTuple):
    """A stored convolution that is similar to a requested one, with the operand sizes of both."""

    place: int  # index of its key
    own: Operands  # of the stored convolution
    other: Operands  # of the requested convolution
    distance: float  # sum over all dimensions of the doublings between the sizes of both

    def factor(self, batch: int) -> float:
        """Return the factor that scales the stored workspace to the requested convolution.

        It is the number of operand elements of the requested convolution, divided by the number of the stored
        convolution.
        """
        return self.other.count(batch) / self.own.count(batch)


def family_of(key: str) -> str:
    """Return the family of a key's convolution as text: direction, kernel, stride, dilation and grouping."""
    letter, x, w, _, stride, dilation = key.split(" ")
    channels, kernel = x.partition("x")[0], w.split("x", 2)
    groups = "dense" if kernel[1] == channels else "depthwise" if kernel[1] == "1" else "grouped"
    return f"{letter} {kernel[2]} {stride} {dilation} {groups}"


def candidates_of(family: str, keys: Iterable[str]) -> list[Candidate]:
    """Return the convolutions of a family among the keys, each with its index."""
    letter, _, stride, dilation, _ = family.split(" ")
    start, end = f"{letter} ", f" {stride} {dilation}"
    likely = ((place, key) for place, key in enumerate(keys) if key.startswith(start) and key.endswith(end))
    return [_candidate(place, key) for place, key in likely if family_of(key) == family]


def find_similar(key: str, candidates: Sequence[Candidate]) -> list[Similar]:
    """Return up to three candidates similar to a key's convolution, the nearest first."""
    one = _candidate(-1, key)
    distances = ((_distance(other.features, one.features), other) for other in candidates)
    nearest = nsmallest(LENDERS, distances, key=lambda pair: pair[0])
    return [Similar(other.place, other.operands, one.operands, distance) for distance, other in nearest]


def _candidate(place: int, key: str) -> Candidate:
    one = convolution_of(key, "float32", channels_last=False, batch=1)
    sizes = (one.x[1], *one.w[:2], *one.x[2:], *map(_alignment, one.w[:2]))
    features = tuple(log2(max(size, 1)) for size in sizes)
    return Candidate(place, features, Operands(prod(one.x) + prod(one.y), prod(one.w)))


def _alignment(channels: int) -> int:
    """Return the largest power of two up to 8 that divides a channel count. Tensor cores take 8 or 4."""
    return min(channels & -channels, _WIDEST)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))
