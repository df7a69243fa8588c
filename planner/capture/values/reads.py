"""Reuse results of reads at a small batch size for tensors too large to compute.

A guard against NaN or a logged mean reads a gigabyte at the batch sizes that a plan tries, to no effect on
memory. Such a read gets the result of the same line at a batch size where it costs little: conditions and
numbers as they were there, counts (of a mask's true elements, say) in the same proportion.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from planner.errors import ModelError

aten = torch.ops.aten

SMALLEST_BATCH = 2  # of the runs whose results are reused
SMALL_BYTES = 2**24  # of the largest tensor that a read computes in such a run
_COUNTS = ("aten::sum", "aten::count_nonzero")  # of which whole numbers grow with the batch
_SELECTIONS = (aten.nonzero.default, aten.masked_select.default, aten.index.Tensor)
_MOST_BYTES = {
    aten._local_scalar_dense.default: 2**25,
    aten._to_copy.default: 2**25,
    aten.equal.default: 2**25,
}
_MOST_BYTES_OF_OTHERS = 2**28  # their results are needed as exact as possible
_MOST_ELEMENTS = 2**14  # of a copy on the CPU that is stored

# In place of a loss or a norm that a script reads to log it: finite, positive, and below any threshold.
GUESS = 2.0**-10
GUESSED_BYTES = 2**20  # of the tensors that a read would compute

Key = tuple[str, str]  # an operator and the line that calls it


class LargeReadError(ModelError):
    """A read needs values of a large random tensor, and no result is stored for it."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"values of a tensor of {size_bytes} bytes are read")
        self.size_bytes = size_bytes


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read, and the number of elements that it read."""

    elements: int
    out: Any  # a number, a count of a mask's true elements, a tensor on the CPU, or shapes of tensors


@dataclass(slots=True)
class ReadLog:
    """The results of one run's reads, in order, by operator and line."""

    batch: int
    new_batch: int  # the batch size for which they are reused
    _results: dict[Key, list[ReadResult]] = field(default_factory=dict)
    _positions: dict[Key, int] = field(default_factory=dict)

    def reused_for(self, batch: int) -> "ReadLog":
        """Return the log with all results to come again, for another batch size."""
        return ReadLog(self.batch, batch, self._results)

    def append(self, key: Key, result: ReadResult) -> None:
        """Store one more result."""
        self._results.setdefault(key, []).append(result)

    def next_result(self, key: Key) -> ReadResult | None:
        """Return the next result of this read, after the last the first again; None where there is none."""
        results = self._results.get(key)
        if not results:
            return None
        position = self._positions.get(key, 0)
        self._positions[key] = position + 1
        return results[position % len(results)]


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """Limits of one run's reads, and the logs that it reads and writes."""

    most_bytes: Callable[[Any], float] = lambda func: float("inf")  # of a random tensor that a read computes
    results: ReadLog | None = None  # for reads of larger ones
    log: ReadLog | None = None  # gets the computed results
    guesses_numbers: bool = False  # of large random tensors: a logged loss gets GUESS


Run = TypeVar("Run")


def run_with_reads(
    batch: int,
    run: Callable[[int, ReadPolicy], Run],
    logs: dict[int, ReadLog] | None = None,
    guesses_numbers: bool = False,
) -> Run:
    """Run a batch size with values; where reads are large, with results of a smaller batch size.

    `logs` has those of runs at small batch sizes, and gets more of them. With `guesses_numbers`, a
    floating-point number of large random tensors is not computed at all.
    """
    try:
        return run(batch, ReadPolicy(_most_bytes, guesses_numbers=guesses_numbers))
    except LargeReadError as error:
        size_bytes = error.size_bytes
    size = _smaller_batch(batch, size_bytes)
    while SMALLEST_BATCH < size < batch:
        if logs is not None and size in logs:
            return run(
                batch, ReadPolicy(_most_bytes, logs[size].reused_for(batch), guesses_numbers=guesses_numbers)
            )
        log = ReadLog(size, batch)
        try:
            run(size, ReadPolicy(lambda func: 4 * SMALL_BYTES, None, log, guesses_numbers))
        except LargeReadError as error:
            size = _smaller_batch(size, error.size_bytes)
        else:
            if logs is not None:
                logs[size] = log.reused_for(batch)
            return run(batch, ReadPolicy(_most_bytes, log, guesses_numbers=guesses_numbers))
    if batch <= SMALLEST_BATCH:
        return run(batch, ReadPolicy(guesses_numbers=guesses_numbers))
    log = ReadLog(SMALLEST_BATCH, batch)
    run(SMALLEST_BATCH, ReadPolicy(log=log, guesses_numbers=guesses_numbers))
    return run(batch, ReadPolicy(_most_bytes, log, guesses_numbers=guesses_numbers))


def _most_bytes(func: Any) -> float:
    return _MOST_BYTES.get(func, _MOST_BYTES_OF_OTHERS)


def _smaller_batch(batch: int, size_bytes: int) -> int:
    """Return a power of two at which a read of so many bytes at `batch` is cheap, at least the smallest."""
    fitting = min(batch // 2, batch * SMALL_BYTES // size_bytes)
    return max(SMALLEST_BATCH, 1 << max(fitting.bit_length() - 1, 0))


def result_of(func: Any, elements: int, out: Any) -> ReadResult:
    """Return the result to store for a read."""
    if func is aten._to_copy.default and isinstance(out, Tensor):
        return ReadResult(elements, out.clone() if out.numel() <= _MOST_ELEMENTS else None)
    if isinstance(out, Tensor | tuple):
        tensors = out if isinstance(out, tuple) else (out,)
        return ReadResult(elements, tuple((tuple(t.shape), t.dtype) for t in tensors))
    return ReadResult(elements, out)


def is_count(number: object, source: str) -> bool:
    """Return whether a number counts elements; `source` is the operator that made it."""
    return isinstance(number, int) and not isinstance(number, bool) and source in _COUNTS


def scaled_count(result: ReadResult, elements: int) -> int:
    """Return the count in the same proportion to so many elements."""
    count: int = round(result.out * elements / max(result.elements, 1))
    return count


def scaled_result(func: Any, result: ReadResult, read: Tensor) -> Any:
    """Return the result of an operator that reads this tensor, from that for a smaller one.

    None for a copy on the CPU that is not stored; NotImplemented for an operator whose results do not scale.
    """
    out = result.out
    if func is aten._to_copy.default:
        return out.clone() if out is not None and out.shape == read.shape else None
    if func in _SELECTIONS and isinstance(out, tuple):
        ((shape, dtype),) = out
        count = round(shape[0] * read.numel() / max(result.elements, 1))
        sizes = (count, *shape[1:])
        strides = (1, count) if len(sizes) == 2 else (1,)
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    if func is aten._unique2.default:
        return _unique(result, read)
    return NotImplemented if isinstance(out, tuple) else out


def _unique(result: ReadResult, read: Tensor) -> tuple[Tensor, ...]:
    """Return as many distinct values where they are few, more in proportion where they are many."""
    (values, dtype), (inverse, _), (counts, _) = result.out
    count = values[0]
    if 2 * count > result.elements:
        count = round(count * read.numel() / max(result.elements, 1))
    return (
        torch.empty(count, dtype=dtype, device="meta"),
        torch.empty(read.shape if inverse != (0,) else 0, dtype=torch.int64, device="meta"),
        torch.empty(count if counts != (0,) else 0, dtype=torch.int64, device="meta"),
    )
