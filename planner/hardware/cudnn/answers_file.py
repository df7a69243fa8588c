"""Read and write the file of stored cuDNN answers.

An answer is the workspace of a convolution on a group of GPUs. The convolutions are of several kinds (type
and memory layout). The file begins with an index: the version, and for each kind the offset of its
convolutions' keys and, for each GPU, the offset of their curves. A plan reads the index, the keys of a kind
and the curves for one GPU. Keys are lines of text. Curves are four columns of numbers. A column is stored as
the lowest bytes of all its numbers, then their next bytes, and so on, which deflates to a third of the size
of the same numbers as JSON. Equal content gives equal bytes.
"""

import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from planner._support.atomic_write import save
from planner._support.bounded_read import read_bytes
from planner.errors import DataFileError
from planner.hardware.cudnn.curves import Curve
from planner.program import Capability

ANSWERS_FILE = Path(__file__).with_name("answers.bin")
_MAGIC = b"planner: answers of a cuDNN, 1\n"
_LENGTH_BYTES = 4  # of the index's own length
_NUMBER_BYTES = 8
_COLUMNS = 4  # of numbers in a packed table of curves
_LARGEST_FILE_BYTES = 2**26


class Kind(NamedTuple):
    """The data type and the memory layout of a group of stored convolutions."""

    dtype: str
    channels_last: bool


class StoredGpus(NamedTuple):
    """A group of GPUs for which the same answers are stored."""

    capability: Capability
    sm_count: int | None  # None if the answers do not depend on it, as for 8.0 and newer

    def __str__(self) -> str:
        text = "compute capability {}.{}".format(*self.capability)
        return text if self.sm_count is None else f"{text} with {self.sm_count} multiprocessors"

    def has_answer(self, capability: Capability, sm_count: int) -> bool:
        """Return whether a GPU with `capability` and `sm_count` multiprocessors is in the group."""
        return self.capability == capability and self.sm_count in (None, sm_count)


CurveByKey = Mapping[str, Curve]
Tables = Mapping[Kind, Mapping[StoredGpus, CurveByKey]]


class _Block(Struct, frozen=True, array_like=True):
    offset: int  # from the end of the index
    packed_bytes: int
    size_bytes: int


class _GpuBlock(Struct, frozen=True, array_like=True):
    gpus: StoredGpus
    curves: _Block


class _KindBlocks(Struct, frozen=True, array_like=True):
    kind: Kind
    keys: _Block
    gpus: tuple[_GpuBlock, ...]  # by ascending capability


class _Index(Struct, frozen=True):
    cudnn: str  # the version
    kinds: tuple[_KindBlocks, ...]


class Curves(Sequence[Curve | None]):
    """The workspace curves of a `Kind`'s convolutions on a group of GPUs, in the order of the keys.

    An item is None if the convolution has no answer. Each curve is created on access, since a plan needs a
    few dozen of ten thousand curves.
    """

    def __init__(
        self, numbers: "array[int]", counts: "array[int]", batches: "array[int]", sizes: "array[int]"
    ):
        self._numbers, self._batches, self._sizes = numbers, batches, sizes
        self._ends = array("q", accumulate(counts, initial=0))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> Curve | None:  # type: ignore[override]
        number = self._numbers[place]
        if not number:
            return None
        part = slice(self._ends[number - 1], self._ends[number])
        return tuple(self._batches[part]), tuple(self._sizes[part])


@dataclass(frozen=True)
class AnswersFile:
    """The content of a file of stored cuDNN answers, unpacked on demand."""

    cudnn: str  # the version
    _kinds: Mapping[Kind, _KindBlocks]
    _content: bytes
    _start: int  # offset of the blocks in `_content`

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the data types and memory layouts of the stored convolutions."""
        return tuple(self._kinds)

    def gpus(self, kind: Kind) -> tuple[StoredGpus, ...]:
        """Return the groups of GPUs with answers of a `Kind`, by ascending capability."""
        return tuple(one.gpus for one in self._kinds[kind].gpus) if kind in self._kinds else ()

    def keys(self, kind: Kind) -> list[str]:
        """Return the keys of all convolutions of a `Kind`, in ascending order."""
        return self._read(self._kinds[kind].keys).decode().split("\n")

    def curves(self, kind: Kind, gpus: StoredGpus) -> Curves:
        """Unpack the workspace curves of a `Kind` on a group of GPUs, in the order of the keys."""
        block = next(one.curves for one in self._kinds[kind].gpus if one.gpus == gpus)
        return Curves(*_unpack_columns(self._read(block)))

    def tables(self) -> Tables:
        """Return all curves of the file, by `Kind`, group of GPUs and key of the convolution."""
        return {
            kind: {gpus: dict(self._answered(kind, gpus)) for gpus in self.gpus(kind)} for kind in self._kinds
        }

    def _answered(self, kind: Kind, gpus: StoredGpus) -> Iterator[tuple[str, Curve]]:
        for key, curve in zip(self.keys(kind), self.curves(kind, gpus), strict=True):
            if curve is not None:
                yield key, curve

    def _read(self, block: _Block) -> bytes:
        start = self._start + block.offset
        return zlib.decompress(self._content[start : start + block.packed_bytes], bufsize=block.size_bytes)


def open_answers(path: Path = ANSWERS_FILE) -> AnswersFile:
    """Read a file of stored answers and decode its index. Raises DataFileError."""
    try:
        content = read_bytes(path, _LARGEST_FILE_BYTES)
        if not content.startswith(_MAGIC):
            raise ValueError("it does not begin as such a file does")
        place = len(_MAGIC) + _LENGTH_BYTES
        end = place + int.from_bytes(content[len(_MAGIC) : place], "little")
        index = msgspec.json.decode(content[place:end], type=_Index)
        last = max((one.offset + one.packed_bytes for one in _blocks(index)), default=0)
        if len(content) != end + last:
            raise ValueError("it is cut short, or has data after its end")
    except (OSError, ValueError) as error:
        raise DataFileError(
            f"{path}: holds no answers of a cuDNN: {error}; install the planner again"
        ) from error
    return AnswersFile(index.cudnn, {one.kind: one for one in index.kinds}, content, end)


def _blocks(index: _Index) -> Iterator[_Block]:
    for kind in index.kinds:
        yield kind.keys
        yield from (one.curves for one in kind.gpus)


def write_answers(path: Path, cudnn: str, tables: Tables) -> None:
    """Write the answers of a version of cuDNN to a file atomically. Raises DataFileError."""
    blocks = bytearray()

    def put(content: bytes) -> _Block:
        packed = zlib.compress(content, 9)
        blocks.extend(packed)
        return _Block(len(blocks) - len(packed), len(packed), len(content))

    kinds = []
    for kind, of_gpus in sorted(tables.items()):
        keys = sorted({key for curves in of_gpus.values() for key in curves})
        placed = put("\n".join(keys).encode())
        stored = (_GpuBlock(gpus, put(_pack_curves(keys, of_gpus[gpus]))) for gpus in sorted(of_gpus))
        kinds.append(_KindBlocks(kind, placed, tuple(stored)))
    index = msgspec.json.encode(_Index(cudnn, tuple(kinds)))
    length = len(index).to_bytes(_LENGTH_BYTES, "little")
    save(path, b"".join((_MAGIC, length, index, blocks)), "the answers")


def _pack_curves(keys: Sequence[str], curves: CurveByKey) -> bytes:
    """Pack curves into the bytes of four columns.

    The columns are the keys' curve numbers, point counts, batch sizes and workspaces. The curve numbers of
    keys begin at 1; the number of a key without a curve is 0. Equal curves have the same number, and the
    points of a curve are stored once.
    """
    found: dict[Curve, int] = {}
    numbers = [found.setdefault(curves[key], len(found) + 1) if key in curves else 0 for key in keys]
    counts = [len(batches) for batches, _ in found]
    return _pack_columns(
        numbers,
        counts,
        [batch for batches, _ in found for batch in batches],
        [size for _, sizes in found for size in sizes],
    )


def _pack_columns(*columns: Sequence[int]) -> bytes:
    lengths = _bytes_of([len(column) for column in columns])
    planes = [_bytes_of(column) for column in columns]
    return lengths + b"".join(raw[place::_NUMBER_BYTES] for raw in planes for place in range(_NUMBER_BYTES))


def _bytes_of(numbers: Sequence[int]) -> bytes:
    packed = array("q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_columns(content: bytes) -> Iterator["array[int]"]:
    start = _COLUMNS * _NUMBER_BYTES
    for length in _numbers_of(content[:start]):
        raw = bytearray(length * _NUMBER_BYTES)
        for place in range(_NUMBER_BYTES):
            raw[place::_NUMBER_BYTES] = content[start : start + length]
            start += length
        yield _numbers_of(raw)


def _numbers_of(raw: bytes | bytearray) -> "array[int]":
    numbers = array("q")
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
