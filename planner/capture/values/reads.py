"""What reads of values gave at a small batch size, to answer those of tensors too large to be computed.

A guard against NaN or a logged mean reads a gigabyte at the batch sizes that a plan tries, to no effect on
memory. Such a read gets the answer of the same line at a batch size where it costs little: conditions and
numbers as they were there, counts (of what a mask lets through, say) in the same proportion.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from planner.capture.cuda.callers import is_of_torch
from planner.errors import ModelError

aten = torch.ops.aten

SMALLEST_BATCH = 2  # of the runs whose answers are used
SMALL_BYTES = 2**24  # of the largest tensor that a read computes in such a run
_COUNTS = ("aten::sum", "aten::count_nonzero")  # of which whole numbers grow with the batch
_SHARES = (aten.nonzero.default, aten.masked_select.default, aten.index.Tensor)
MOST_BYTES = {
    aten._local_scalar_dense.default: 2**25,
    aten._to_copy.default: 2**25,
    aten.equal.default: 2**25,
}
MOST_BYTES_OF_OTHERS = 2**28  # their results are needed as exactly as they can be had
_KEPT_ELEMENTS = 2**14  # of a copy on the CPU that is remembered

Key = tuple[str, str]  # an operator and the line that calls it


class LargeReadError(ModelError):
    """A read needs values of a tensor of chance that is large, and nobody has answered it yet."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"values of a tensor of {size_bytes} bytes are read")
        self.size_bytes = size_bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What a read gave, and from how many elements."""

    elements: int
    out: Any  # a number, a count of what a mask lets through, a tensor on the CPU, or shapes of tensors


@dataclass(slots=True)
class Reads:
    """The answers of one run, in order, by operator and line."""

    batch: int
    wanted: int  # the batch size that they are for
    _answers: dict[Key, list[Answer]] = field(default_factory=dict)
    _asked: dict[Key, int] = field(default_factory=dict)

    def note(self, key: Key, answer: Answer) -> None:
        """Remember one more answer."""
        self._answers.setdefault(key, []).append(answer)

    def following(self, key: Key) -> Answer | None:
        """The next answer at this place, from the first again after the last; None where there is none."""
        answers = self._answers.get(key)
        if not answers:
            return None
        number = self._asked.get(key, 0)
        self._asked[key] = number + 1
        return answers[number % len(answers)]


@dataclass(frozen=True, slots=True)
class Reading:
    """How reads of one run are answered."""

    most_bytes: Callable[[Any], float] = lambda func: float("inf")  # of a tensor that is computed for one
    answers: Reads | None = None  # for those of more
    noted: Reads | None = None  # takes what is computed


Run = TypeVar("Run")


def take_reading(batch: int, take: Callable[[int, Reading], Run]) -> Run:
    """A run of the batch size with values; where reads are large, answered by a run of a smaller one."""
    try:
        return take(batch, Reading(most_bytes_of))
    except LargeReadError as error:
        size_bytes = error.size_bytes
    size = smaller_batch(batch, size_bytes)
    while SMALLEST_BATCH < size < batch:
        noted = Reads(size, batch)
        try:
            take(size, Reading(lambda func: 4 * SMALL_BYTES, noted=noted))
        except LargeReadError as error:
            size = smaller_batch(size, error.size_bytes)
        else:
            return take(batch, Reading(most_bytes_of, answers=noted))
    if batch <= SMALLEST_BATCH:
        return take(batch, Reading())
    noted = Reads(SMALLEST_BATCH, batch)
    take(SMALLEST_BATCH, Reading(noted=noted))
    return take(batch, Reading(most_bytes_of, answers=noted))


def most_bytes_of(func: Any) -> float:
    """Bytes of a tensor of chance up to which an operator that reads it computes it."""
    return MOST_BYTES.get(func, MOST_BYTES_OF_OTHERS)


def smaller_batch(batch: int, size_bytes: int) -> int:
    """A power of two at which a read of so many bytes at `batch` is cheap, at least the smallest."""
    fitting = min(batch // 2, batch * SMALL_BYTES // size_bytes)
    return max(SMALLEST_BATCH, 1 << max(fitting.bit_length() - 1, 0))


def line_that_reads() -> str:
    """The innermost line that is neither torch's nor the planner's, as FILE:LINE."""
    frame = sys._getframe(1)
    while is_of_torch(frame) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def noted_answer(func: Any, elements: int, out: Any) -> Answer:
    """The answer to be remembered."""
    if func is aten._to_copy.default and isinstance(out, Tensor):
        return Answer(elements, out.clone() if out.numel() <= _KEPT_ELEMENTS else None)
    if isinstance(out, Tensor | tuple):
        several = out if isinstance(out, tuple) else (out,)
        return Answer(elements, tuple((tuple(one.shape), one.dtype) for one in several))
    return Answer(elements, out)


def is_count(number: object, source: str) -> bool:
    """Whether a number that is read counts elements; `source` is the operator that made it."""
    return isinstance(number, int) and not isinstance(number, bool) and source in _COUNTS


def scaled_count(answer: Answer, elements: int) -> int:
    """The count in the same proportion to so many elements."""
    return int(round(answer.out * elements / max(answer.elements, 1)))


def answered(func: Any, answer: Answer, like: Tensor, shape: tuple[int, ...]) -> Any:
    """What the operator gives for a tensor like this one, by an answer for a smaller one.

    `shape` is that of a copy on the CPU. NotImplemented for an operator whose answers say nothing.
    """
    elements = like.numel()
    if func is aten._to_copy.default:
        known = answer.out
        return known.clone() if known is not None and tuple(known.shape) == shape else None
    if func in _SHARES and isinstance(answer.out, tuple):
        ((found, kind),) = answer.out
        count = round(found[0] * elements / max(answer.elements, 1))
        sizes = (count, *found[1:])
        strides = (1, count) if len(sizes) == 2 else (1,)
        return torch.empty_strided(sizes, strides, dtype=kind, device="meta")
    if func is aten._unique2.default:
        return _unique(answer, like)
    if isinstance(answer.out, tuple):
        return NotImplemented
    return answer.out


def _unique(answer: Answer, like: Tensor) -> tuple[Tensor, ...]:
    """Few distinct values stay as many, many become more."""
    (values, kind), (inverse, _), (counts, _) = answer.out
    count = values[0]
    if 2 * count > answer.elements:
        count = round(count * like.numel() / max(answer.elements, 1))
    return (
        torch.empty(count, dtype=kind, device="meta"),
        torch.empty(like.shape if inverse != (0,) else 0, dtype=torch.int64, device="meta"),
        torch.empty(count if counts != (0,) else 0, dtype=torch.int64, device="meta"),
    )
