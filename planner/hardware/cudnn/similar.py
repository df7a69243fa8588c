"""The stored convolution that is most similar to one that is not stored."""

from collections.abc import Iterable, Sequence
from math import log2, prod
from typing import NamedTuple

from planner.hardware.cudnn.keys import convolution_of


class Candidate(NamedTuple):
    """A stored convolution."""

    place: int  # among the keys
    features: tuple[float, ...]
    operand_size: int


class Similar(NamedTuple):
    """A stored convolution that stands for another."""

    place: int  # among the keys
    factor: float  # elements of input and output of the other over its own
    distance: float  # the sum of all doublings between their sizes


def family_of(key: str) -> str:
    """Return the text that is equal for convolutions of one kind: direction, kernel, stride, groups."""
    letter, x, w, _, stride, dilation = key.split(" ")
    channels, kernel = x.partition("x")[0], w.split("x", 2)
    groups = "dense" if kernel[1] == channels else "depthwise" if kernel[1] == "1" else "grouped"
    return f"{letter} {kernel[2]} {stride} {dilation} {groups}"


def candidates_of(family: str, keys: Iterable[str]) -> list[Candidate]:
    """Return the convolutions of a family, with their places among the keys."""
    letter, _, stride, dilation, _ = family.split(" ")
    start, end = f"{letter} ", f" {stride} {dilation}"
    likely = ((place, key) for place, key in enumerate(keys) if key.startswith(start) and key.endswith(end))
    return [_candidate(place, key) for place, key in likely if family_of(key) == family]


def find_similar(key: str, candidates: Sequence[Candidate]) -> Similar | None:
    """Return the convolution of a family that is most similar to one; None if there is none."""
    own = _candidate(-1, key)
    if not candidates:
        return None
    nearest = min(candidates, key=lambda one: _distance(one.features, own.features))
    factor = own.operand_size / nearest.operand_size
    return Similar(nearest.place, factor, _distance(nearest.features, own.features))


def _candidate(place: int, key: str) -> Candidate:
    one = convolution_of(key, "float32", channels_last=False, batch=1)
    features = tuple(log2(max(size, 1)) for size in (one.x[1], one.w[0], *one.x[2:]))
    return Candidate(place, features, prod(one.x) + prod(one.y))


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))
