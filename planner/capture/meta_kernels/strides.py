"""Compute the strides of new tensors.

Sources: torch's memory formats, and ATen/TensorIterator.cpp. Strides count elements, not bytes. Callers must
handle shapes that contain 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Rank -> the dimensions of the channels-last format, outermost first.
CHANNELS_LAST: Mapping[int, tuple[int, ...]] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


# Bound before names of torch are replaced for user code (`planned_device`).
_empty, _empty_strided = torch.empty, torch.empty_strided


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous meta tensor."""
    return _empty(shape, dtype=dtype, device="meta")


def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor with these strides."""
    return _empty_strided(shape, strides, dtype=dtype, device="meta")


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return _strides_in_order(shape, range(len(shape)))


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new channels-last tensor.

    >>> channels_last((2, 3, 4, 5))
    (60, 1, 15, 3)
    """
    return _strides_in_order(shape, CHANNELS_LAST[len(shape)])


def _strides_in_order(shape: Sequence[int], outermost_first: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with dimensions in the order `outermost_first` in memory."""
    strides = [0] * len(shape)
    step = 1
    for dimension in reversed(outermost_first):
        strides[dimension] = step
        step *= shape[dimension]
    return tuple(strides)


def is_contiguous_meta(t: Any) -> bool:
    """Return whether a value is a non-empty contiguous meta tensor.

    Its strides are exactly the strides of a new contiguous tensor.
    """
    return isinstance(t, Tensor) and t.is_meta and 0 not in t.shape and t.stride() == contiguous(t.shape)


def is_floating_meta(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are meta tensors of one floating-point dtype. None is ignored."""
    kinds = {t.dtype if t.is_meta else None for t in tensors if t is not None}
    kind = kinds.pop()
    return not kinds and kind is not None and kind.is_floating_point


def suggests_channels_last(t: Tensor) -> bool:
    """Return whether `Tensor::suggest_memory_format` returns channels last."""
    return strides_suggest_channels_last(t.shape, t.stride())


def strides_suggest_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether sizes and strides suggest channels last.

    This is `is_channels_last_strides_2d` or `_3d` (c10/core/MemoryFormat.h).
    """
    if len(shape) not in CHANNELS_LAST or strides[1] == 0:
        return False
    least = 0
    for dimension in reversed(CHANNELS_LAST[len(shape)]):
        if shape[dimension] == 0 or strides[dimension] < least:
            return False
        if dimension == 0 and least == strides[1]:
            return False
        least = strides[dimension] * (shape[dimension] if shape[dimension] > 1 else 1)
    return True


def is_in_format(shape: Sequence[int], strides: Sequence[int], is_last: bool) -> bool:
    """Return whether strides are channels last if `is_last`, or else whether they are contiguous.

    The tensor must have no gaps. The strides of dimensions of size 1 are ignored (c10/core/Contiguity.h).

    >>> is_in_format((2, 3, 1, 1), (3, 1, 1, 1), is_last=True)
    True
    """
    outermost_first = CHANNELS_LAST[len(shape)] if is_last else range(len(shape))
    step = 1
    for dimension in reversed(outermost_first):
        if shape[dimension] != 1:
            if strides[dimension] != step:
                return False
            step = step * shape[dimension]
    return True


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor has neither gaps nor overlaps in memory. Its dimensions may have any order."""
    step = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] > 1):
        if stride != step:
            return False
        step *= size
    return True


def broadcast(shapes: Sequence[Sequence[int]]) -> Sequence[int] | None:
    """Return the shape to which all `shapes` broadcast, or None if they do not broadcast."""
    sizes = []
    for place in range(-max(map(len, shapes)), 0):
        common = 1
        for shape in shapes:
            if len(shape) >= -place and shape[place] != 1 and shape[place] != common:
                if common != 1:
                    return None
                common = shape[place]
        sizes.append(common)
    return tuple(sizes)


def pointwise_strides(shape: Sequence[int], operands: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the strides of a pointwise operator's output.

    `operands` are the operands' strides in the output's shape. Numbers and broadcast dimensions have strides
    of 0.

    >>> pointwise_strides((1, 8, 2, 2), [(8, 1, 16, 8)])  # channels last, whatever the stride of size 1
    (32, 1, 16, 8)
    >>> pointwise_strides((1, 8, 2, 2), [(8, 1, 16, 8), (0, 0, 0, 0)])  # unchanged if an operand is a number
    (8, 1, 16, 8)
    """
    if all(any(strides) for strides in operands):  # TensorIteratorBase::compute_fast_setup_type
        if all(is_in_format(shape, strides, is_last=False) for strides in operands):
            return contiguous(shape)
        if len(shape) == 4 and all(is_in_format(shape, strides, is_last=True) for strides in operands):
            return channels_last(shape)
        if len(set(operands)) == 1 and is_dense(shape, operands[0]):
            return operands[0]
    return _strides_in_order(shape, _innermost_first(shape, operands)[::-1])


def _innermost_first(shape: Sequence[int], operands: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the dimensions from innermost to outermost, as TensorIterator sorts them by operands' strides.

    The sort is an insertion sort. A pair of dimensions keeps its order if each operand is broadcast along one
    of them.
    """

    def belongs_later(inner: int, outer: int) -> int:
        for strides in operands:
            a, b = strides[inner], strides[outer]
            if a == 0 or b == 0:
                continue
            if a != b:
                return 1 if a > b else -1
            if shape[inner] > shape[outer]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for index in range(1, len(order)):
        moving = index
        for other in range(index - 1, -1, -1):
            verdict = belongs_later(order[other], order[moving])
            if verdict > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif verdict < 0:
                break
    return order
