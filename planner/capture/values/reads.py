"""Reuse the values that a model reads at a small batch size in captures at larger batch sizes.

Values are reused if tensors are too large or too many to compute. A check for NaN or a logged mean may read a
gigabyte at the batch sizes that a plan tries, without effect on memory; a detector reads small tensors for
each of its images. Such a read gets the result of the same line at a batch size at which it is cheap.
Conditions and numbers are reused unchanged; counts, for example of a mask's true elements, are scaled in
proportion.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from planner.errors import ModelError

aten = torch.ops.aten

SMALLEST_BATCH = 2  # smallest batch size of runs whose results are reused
SMALL_BYTES = 2**24  # intended largest tensor that a read computes in such a run
_COUNTS = ("aten::sum", "aten::count_nonzero")  # their integer results grow with the batch
_SELECTIONS = ("aten::nonzero", "aten::masked_select", "aten::index", "torchvision::nms")
_MOST_BYTES = {
    aten._local_scalar_dense.default: 2**25,
    aten._to_copy.default: 2**25,
    aten.equal.default: 2**25,
}
_MOST_BYTES_OF_OTHERS = 2**28  # limit for other operators, whose results should be as exact as possible
_MOST_BYTES_OF_RUN = 2**31  # limit for all random tensors that a run's reads compute: one or two seconds
_BATCH_OF_MANY = 4  # batch size of the run whose results are reused if a run exceeds that limit
_MOST_ELEMENTS = 2**14  # largest copy on the CPU that is stored

# Replaces a loss or a norm that a script reads to log it: finite, positive, and below any threshold.
GUESS = 2.0**-10
GUESSED_BYTES = 2**20  # a number is guessed if the read would compute larger tensors

Key = tuple[str, str]  # an operator and the line that calls it


class LargeReadError(ModelError):
    """Raised if a read needs values of a large random tensor, and no other run's results can be reused."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"values of a tensor of {size_bytes} bytes are read")
        self.size_bytes = size_bytes


class ManyReadsError(ModelError):
    """Raised if the reads of a run compute more bytes of random tensors than the run's limit."""

    def __init__(self) -> None:
        super().__init__(f"values of more than {_MOST_BYTES_OF_RUN} bytes are read")


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read, and the number of elements that it read."""

    elements: int
    out: Any  # a number, a count of true elements, a CPU tensor, tensors' shapes and dtypes, or None


@dataclass(slots=True)
class ReadLog:
    """The results of one run's value reads in order, keyed by operator and source line."""

    batch: int
    new_batch: int  # the batch size for which the results are reused
    computed_bytes: int = 0  # bytes of all random tensors that the reads computed
    _results: dict[Key, list[ReadResult]] = field(default_factory=dict)
    _positions: dict[Key, int] = field(default_factory=dict)

    def reused_for(self, batch: int) -> "ReadLog":
        """Return a log of the same results for another batch size, to be read from the start."""
        return ReadLog(self.batch, batch, _results=self._results)

    def append(self, key: Key, result: ReadResult) -> None:
        """Append the result of a read to the results with the same key."""
        self._results.setdefault(key, []).append(result)

    def next_result(self, key: Key) -> ReadResult | None:
        """Return a key's next result, the first again after the last, or None if the key has none."""
        results = self._results.get(key)
        if not results:
            return None
        position = self._positions.get(key, 0)
        self._positions[key] = position + 1
        return results[position % len(results)]


@dataclass(slots=True)
class ReadLogs:
    """The results of value reads in a job's runs at small batch sizes."""

    by_batch: dict[int, ReadLog] = field(default_factory=dict)
    too_many: int | None = None  # batch size whose reads were too many to compute; None if unknown
    bytes_of_sample: float = 0.0  # bytes that the reads of a run compute, divided by its batch size

    def are_too_many(self, batch: int) -> bool:
        """Return whether a run at a batch size is known, or expected, to read too many values to compute."""
        is_known = self.too_many is not None and batch >= self.too_many
        return is_known or self.bytes_of_sample * batch > 2 * _MOST_BYTES_OF_RUN


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """Limits on the value reads of one run, with logs to reuse and to fill."""

    # Maps a read's operator to the size of the largest random tensor that the read may compute.
    most_bytes: Callable[[Any], float] = lambda func: inf
    most_bytes_of_run: float = inf  # bytes of all tensors that reads of random values compute
    results: ReadLog | None = None  # results that reads of larger tensors reuse; None if there are none
    log: ReadLog = field(default_factory=lambda: ReadLog(0, 0))  # computed results are added to it
    guesses_numbers: bool = False  # whether a number read from large random tensors is GUESS

    @property
    def reuses_all(self) -> bool:
        """Return whether each read of a random value reuses a result of a run at a small batch size.

        If not, only reads of large tensors do.
        """
        return self.most_bytes is _none


Run = TypeVar("Run")


def run_with_reads(
    batch: int,
    run: Callable[[int, ReadPolicy], Run],
    logs: ReadLogs | None = None,
    guesses_numbers: bool = False,
) -> Run:
    """Run a capture at a batch size, with results of a smaller batch for reads that are too large or many.

    Returns the capture's result. `logs` holds the reads of runs at small batch sizes, and gets those of
    further runs. With `guesses_numbers`, a floating-point number read from large random tensors is `GUESS`.
    """
    logs = ReadLogs() if logs is None else logs
    policy = partial(ReadPolicy, guesses_numbers=guesses_numbers)

    def results_at(size: int, most_bytes: Callable[[Any], float] = lambda func: inf) -> ReadLog:
        if size not in logs.by_batch:
            log = ReadLog(size, size)
            run(size, policy(most_bytes, log=log))
            logs.by_batch[size] = log
        return logs.by_batch[size].reused_for(batch)

    if not logs.are_too_many(batch):
        log = ReadLog(batch, batch)
        most_bytes = _MOST_BYTES_OF_RUN if batch > _BATCH_OF_MANY else inf
        try:
            out = run(batch, policy(_most_bytes, most_bytes, log=log))
        except ManyReadsError:  # its tensors are freed before the next run
            logs.too_many = batch
        except LargeReadError as error:
            if batch <= SMALLEST_BATCH:
                return run(batch, policy())
            results = _results_of_large(_smaller_batch(batch, error.size_bytes), results_at)
            return run(batch, policy(_most_bytes, results=results))
        else:
            logs.bytes_of_sample = max(logs.bytes_of_sample, log.computed_bytes / batch)
            return out
    return run(batch, policy(_none, results=results_at(_BATCH_OF_MANY)))


def _results_of_large(size: int, results_at: Callable[..., ReadLog]) -> ReadLog:
    """Return the read log of a run at `size`, or at a smaller batch size if reads are too large.

    At `SMALLEST_BATCH`, reads of any size are computed.
    """
    while size > SMALLEST_BATCH:
        try:
            return results_at(size, lambda func: 4 * SMALL_BYTES)
        except LargeReadError as error:
            size = _smaller_batch(size, error.size_bytes)
    return results_at(SMALLEST_BATCH)


def _none(func: Any) -> float:
    return 0


def _most_bytes(func: Any) -> float:
    return _MOST_BYTES.get(func, _MOST_BYTES_OF_OTHERS)


def _smaller_batch(batch: int, size_bytes: int) -> int:
    """Return a smaller batch size at which a large read is cheap.

    The read takes `size_bytes` at the batch size `batch`. The result is a power of two, and at least
    `SMALLEST_BATCH`.
    """
    fitting = min(batch // 2, batch * SMALL_BYTES // size_bytes)
    return max(SMALLEST_BATCH, 1 << max(fitting.bit_length() - 1, 0))


def result_of(func: Any, elements: int, out: Any) -> ReadResult:
    """Return a read's result as a log stores it: a number, a small copy, shapes, or None for a large copy."""
    if func is aten._to_copy.default and isinstance(out, Tensor):
        return ReadResult(elements, out.clone() if out.numel() <= _MOST_ELEMENTS else None)
    if isinstance(out, Tensor | tuple):
        tensors = out if isinstance(out, tuple) else (out,)
        return ReadResult(elements, tuple((tuple(t.shape), t.dtype) for t in tensors))
    return ReadResult(elements, out)


def is_count(number: object, source: str) -> bool:
    """Return whether a number is an integer that `sum` or `count_nonzero` made.

    Such a number counts elements, and grows with the batch. `source` is the operator that made the number.
    """
    return isinstance(number, int) and not isinstance(number, bool) and source in _COUNTS


def scaled_count(result: ReadResult, elements: int) -> int:
    """Scale a stored count in proportion to the number of elements that a read covers."""
    count: int = round(result.out * elements / max(result.elements, 1))
    return count


def scaled_result(func: Any, result: ReadResult, read: Tensor) -> Any:
    """Return the result of reading `read`, derived from the stored result of a smaller tensor.

    The length of a selection is scaled in proportion, and a number is returned unchanged. Returns None for a
    copy on the CPU that is not stored or has another shape, and NotImplemented for an operator whose results
    do not scale.
    """
    out = result.out
    if func is aten._to_copy.default:
        return out.clone() if out is not None and out.shape == read.shape else None
    if func._schema.name in _SELECTIONS and isinstance(out, tuple):
        ((shape, dtype),) = out
        count = round(shape[0] * read.numel() / max(result.elements, 1))
        sizes = (count, *shape[1:])
        strides = (1, count) if len(sizes) == 2 else (1,)
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    if func is aten._unique2.default:
        return _unique(result, read)
    return NotImplemented if isinstance(out, tuple) else out


def _unique(result: ReadResult, read: Tensor) -> tuple[Tensor, ...]:
    """Return meta results of `_unique2` with a guessed number of distinct values.

    The guess follows from a smaller tensor. The number stays the same if at most half of the smaller tensor's
    elements are distinct, and otherwise grows in proportion.
    """
    (values, dtype), (inverse, _), (counts, _) = result.out
    count = values[0]
    if 2 * count > result.elements:
        count = round(count * read.numel() / max(result.elements, 1))
    return (
        torch.empty(count, dtype=dtype, device="meta"),
        torch.empty(read.shape if inverse != (0,) else 0, dtype=torch.int64, device="meta"),
        torch.empty(count if counts != (0,) else 0, dtype=torch.int64, device="meta"),
    )
