"""Stored answers of cuDNN for the convolutions of common models, for machines that have no cuDNN.

A file holds the answers of one version for one compute capability, type and memory layout: of each
convolution the workspace as lines through a few batch sizes. `tools/store_convolutions.py` writes them. A
convolution that is not among them takes the answer of the most similar one, scaled by the elements of input
and output.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import log2, prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from planner._support.gzip_text import read_packed
from planner.program import Capability, Convolution, ConvWorkspaceSource, Direction, Workspaces

FOLDER = Path(__file__).with_name("stored")
_LARGEST_FILE_BYTES = 2**26
_SMALL_BYTES = 2**18
_LETTERS = {Direction.FORWARD: "f", Direction.DATA: "d", Direction.WEIGHT: "w"}

# Rising batch sizes, and the workspace at each in bytes.
Curve = tuple[tuple[int, ...], tuple[int, ...]]


class StoredFile(Struct):
    """The content of a file."""

    cudnn: str  # the version
    curves: list[Curve]
    convolutions: dict[str, int]  # by `key_of`: index into the curves


class Scaled(NamedTuple):
    """A curve whose workspaces are multiplied by a factor."""

    curve: Curve
    factor: float
    distance: float = 0.0  # from the convolution that it is of: the sum of all doublings of its sizes


class StoredGpus(NamedTuple):
    """GPUs that have a file of answers."""

    capability: Capability
    sm_count: int | None  # None: it decides nothing, as from 8.0 on

    def __str__(self) -> str:
        text = "compute capability {}.{}".format(*self.capability)
        return text if self.sm_count is None else f"{text} with {self.sm_count} multiprocessors"

    def answer_for(self, capability: Capability, sm_count: int) -> bool:
        """Return whether the answers are those for such a GPU."""
        return self.capability == capability and self.sm_count in (None, sm_count)


@dataclass(frozen=True)
class Answers:
    """The answers of a file."""

    cudnn: str
    gpus: StoredGpus  # whose answers they are
    curves: Sequence[Curve]
    convolutions: Mapping[str, int]

    def find(self, key: str) -> Curve | None:
        """Return the curve of a convolution by its `key_of`; None for one that is not stored."""
        number = self.convolutions.get(key)
        return None if number is None else self.curves[number]

    def find_similar(self, key: str) -> Scaled | None:
        """Return the curve of the most similar convolution, scaled by the elements of input and output; None
        where none is of its kind.
        """
        letter, x, w, *shape = _parse(key)
        candidates = self._groups.get(_family(letter, x, w, *shape))
        if not candidates:
            return None
        features = _features(x, w)
        other, size, number = min(candidates, key=lambda one: _distance(one[0], features))
        factor = _operand_size(x, w, *shape) / size
        return Scaled(self.curves[number], factor, _distance(other, features))

    @cached_property
    def _groups(self) -> dict[str, list[tuple[tuple[float, ...], float, int]]]:
        """Return features, elements and curve of all convolutions, by `_family`."""
        groups: dict[str, list[tuple[tuple[float, ...], float, int]]] = {}
        for key, number in self.convolutions.items():
            letter, x, w, *shape = _parse(key)
            row = (_features(x, w), _operand_size(x, w, *shape), number)
            groups.setdefault(_family(letter, x, w, *shape), []).append(row)
        return groups


class StoredWorkspaces:
    """The stored answers as what answers for the convolutions of a job."""

    name = "stored"

    def __init__(self, *, benchmark: bool) -> None:
        self._benchmark = benchmark
        self._found: dict[tuple[Any, ...], Scaled] = {}
        self._similar: dict[str, float] = {}  # how far from the convolutions whose answers they take
        self._unknown: set[str] = set()
        self._all: set[str] = set()
        self._version = ""
        self._others: dict[Capability, StoredGpus] = {}  # whose answers stand for others

    def __call__(self, capability: Capability, sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the stored workspace, or that of a similar convolution."""
        one = convolution  # by all but its batch size
        key = (
            *(capability, sm_count, one.dtype, one.channels_last, one.direction, one.x[1:], one.w),
            *(one.padding, one.stride, one.dilation),
        )
        if key not in self._found:
            self._found[key] = self._find(capability, sm_count, convolution)
        found = self._found[key]
        return Workspaces(round(value_at(found.curve, convolution.x[0]) * found.factor))

    def following(
        self, capability: Capability, sm_count: int, convolution: Convolution, size_bytes: int
    ) -> tuple[int, ...] | None:
        """Return None: what follows a refused workspace is not known."""
        return None

    def source(self, capability: Capability) -> ConvWorkspaceSource:
        """Return whether all answers are those of the very convolutions, and whether most have any."""
        if 2 * len(self._unknown) > len(self._all):
            return ConvWorkspaceSource.UNCOUNTED
        if self._unknown:
            return ConvWorkspaceSource.PUBLISHED
        exact = not self._similar and not self._benchmark and capability not in self._others
        return ConvWorkspaceSource.STORED if exact else ConvWorkspaceSource.SIMILAR

    def notes(self, capability: Capability) -> tuple[str, ...]:
        """Return which version's answers these are, and for how many convolutions there are others."""
        notes = [f"convolutions take the workspaces that cuDNN {self._version} requests, by stored answers"]
        if capability in self._others:
            notes[0] += f" for {self._others[capability]}"
        if self._similar:
            farthest = 2 ** max(self._similar.values())
            notes[0] += (
                f"; {len(self._similar)} of {len(self._all)} are not among them and borrow those of similar "
                f"ones, whose channels and extents differ by a factor of up to {farthest:,.1f} in all (with "
                "an installed cuDNN, such as that of torch for CUDA, it is queried instead)"
            )
        if self._unknown == self._all:
            notes.clear()
        if self._unknown:
            notes.append(f"no workspace is counted for {len(self._unknown)} of {len(self._all)} convolutions")
        if self._benchmark:
            notes.append(
                "stored answers lack the engines that cudnn.benchmark times; an installed cuDNN names them"
            )
        return tuple(notes)

    def _find(self, capability: Capability, sm_count: int, convolution: Convolution) -> Scaled:
        key = key_of(convolution)
        answers = stored_answers(
            capability, sm_count, convolution.dtype, channels_last=convolution.channels_last
        )
        self._all.add(key)
        if answers is None:
            self._unknown.add(key)
            return NOTHING
        self._version = answers.cudnn
        if not answers.gpus.answer_for(capability, sm_count):
            self._others[capability] = answers.gpus
        curve = answers.find(key)
        if curve is not None:
            return Scaled(curve, 1)
        similar = answers.find_similar(key)
        if similar is None:
            self._unknown.add(key)
            return NOTHING
        self._similar[key] = similar.distance
        return similar


NOTHING = Scaled(((1,), (0,)), 1)


@cache
def stored_gpus(dtype: str = "float32", *, channels_last: bool = False) -> tuple[StoredGpus, ...]:
    """Return the GPUs that have stored answers for a type and layout, by their capability."""
    end = _end_of_name(dtype, channels_last)
    names = [path.name.removesuffix(end).split("-") for path in FOLDER.glob(f"*{end}")]
    return tuple(sorted(StoredGpus(_capability(name), int(sms[0]) if sms else None) for name, *sms in names))


def _capability(name: str) -> Capability:
    major, _, minor = name.partition(".")
    return int(major), int(minor)


@cache
def stored_answers(
    capability: Capability, sm_count: int, dtype: str, *, channels_last: bool
) -> Answers | None:
    """Return the answers for a type and layout on such GPUs, else on the nearest older ones that have any or
    on the oldest, with the nearest number of multiprocessors where that decides; None where there are none.

    Those for float16 stand for bfloat16, which cuDNN mostly answers alike.
    """
    kind = "float16" if dtype == "bfloat16" else dtype
    stored = stored_gpus(kind, channels_last=channels_last)
    if not stored:
        return None
    nearest = max((one.capability for one in stored if one.capability <= capability), default=stored[0][0])
    alike = [one for one in stored if one.capability == nearest]
    gpus = min(alike, key=lambda one: abs((one.sm_count or sm_count) - sm_count))
    file = read_stored(FOLDER / file_name(gpus, kind, channels_last))
    return Answers(file.cudnn, gpus, file.curves, file.convolutions)


def read_stored(path: Path) -> StoredFile:
    """Return the content of a file."""
    return msgspec.json.decode(read_packed(path, _LARGEST_FILE_BYTES), type=StoredFile)


def file_name(gpus: StoredGpus, dtype: str, channels_last: bool) -> str:
    """Return the name of a file of answers."""
    major, minor = gpus.capability
    number = "" if gpus.sm_count is None else f"-{gpus.sm_count}"
    return f"{major}.{minor}{number}{_end_of_name(dtype, channels_last)}"


def _end_of_name(dtype: str, channels_last: bool) -> str:
    return f"-{dtype}-{'channels_last' if channels_last else 'contiguous'}.json.gz"


def key_of(convolution: Convolution) -> str:
    """Return the text that names a convolution in a file: all but its type, layout and batch size.

    >>> key_of(Convolution(Direction.DATA, "float32", (8, 3, 9, 9), (4, 3, 3, 3), (8, 4, 7, 7), False,
    ...                    (0, 0), (1, 1), (1, 1)))
    'd 3x9x9 4x3x3x3 0x0 1x1 1x1'
    """
    sizes = (convolution.x[1:], convolution.w, convolution.padding, convolution.stride, convolution.dilation)
    return " ".join((_LETTERS[convolution.direction], *("x".join(map(str, each)) for each in sizes)))


def value_at(curve: Curve, batch: int) -> int:
    """Return the workspace at a batch size, in bytes: on the line between its neighbours, or beyond the ends.

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
    """Return a curve through the workspaces at batch sizes, with more of them where no line joins two.

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
    """Return whether the allocator hardly sees the difference: workspaces of one size reuse a block."""
    return abs(expected - true) <= (_SMALL_BYTES if max(expected, true) < _SMALL_BYTES else 4096)


def _without_needless(knots: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Drop points that lie near the line through those that stay."""
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


# ---- similar convolutions


def _parse(
    key: str,
) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    letter, *sizes = key.split(" ")
    x, w, padding, stride, dilation = (tuple(map(int, each.split("x"))) for each in sizes)
    return letter, x, w, padding, stride, dilation


def _family(
    letter: str, x: Sequence[int], w: Sequence[int], padding: object, stride: object, dilation: object
) -> str:
    """Return the text that is equal for convolutions of one kind: direction, kernel, stride, groups."""
    groups = x[0] // max(w[1], 1)
    kind = "dense" if groups == 1 else "depthwise" if groups == x[0] else "grouped"
    return f"{letter} {w[2:]} {stride} {dilation} {kind}"


def _features(x: Sequence[int], w: Sequence[int]) -> tuple[float, ...]:
    """Return the logarithms of channels and extents."""
    return tuple(log2(max(size, 1)) for size in (x[0], w[0], *x[1:]))


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _operand_size(
    x: Sequence[int], w: Sequence[int], padding: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> int:
    """Return the elements of input and output of one sample."""
    output = prod(_extents(x[1:], w[2:], padding, stride, dilation))
    return prod(x) + w[0] * output


def _extents(*sizes: Sequence[int]) -> Iterator[int]:
    for extent, kernel, pad, step, spread in zip(*sizes, strict=True):
        yield max((extent + 2 * pad - spread * (kernel - 1) - 1) // step + 1, 1)
