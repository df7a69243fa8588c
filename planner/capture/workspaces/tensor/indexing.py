"""Scratch memory of look-ups that write: embedding's gradient and `index_put`."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import broadcast
from planner.capture.workspaces.steps import Held, Made, Rule, Step, argument, copies, tensor_bytes
from planner.capture.workspaces.tensor.sorting import radix_sort_bytes
from planner.program import Target

aten = torch.ops.aten

_FEW_INDICES = 3072  # up to here, one kernel without sorting (ATen/native/cuda/Embedding.cu)
_MASKS = (torch.bool, torch.uint8)
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD of EmbeddingBackwardKernel.cu


def _embedding_backward(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """Many indices are sorted, and equal ones summed ten at a time into partial rows in float32.

    ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu. The partial rows are as many as a tenth of
    the indices plus the distinct ones can be. Sources of 2026 have another path without them where few
    rows meet many indices; torch 2.13 is taken to be without it.
    """
    grad, indices, rows, _, by_frequency = args[:5]
    many = indices.numel()
    before = copies(indices, grad)
    if many <= _FEW_INDICES and not by_frequency:
        return (*before, Made.REST)
    return (*before, *_sorted(indices, many), *_partial_rows(indices, many, rows, grad, out))


def _sorted(indices: Tensor, many: int) -> tuple[Step, ...]:
    """The sorted indices and where they stood; the numbers 0, 1, 2, ... only while they are sorted."""
    unit = indices.element_size()
    return Held(many * unit), Held(many * unit), many * unit + radix_sort_bytes(many, unit, unit)


def _partial_rows(indices: Tensor, many: int, rows: int, grad: Tensor, out: Tensor) -> tuple[Step, ...]:
    unit = indices.element_size()
    segments = min(many, rows)
    partial = many // _ROWS_PER_THREAD + segments
    width = prod(grad.shape[-1:])
    accumulator = 8 if grad.dtype is torch.float64 else 4
    return (
        Made.REST,
        Held(segments * unit),  # where equal indices start
        Held(8),
        Held(segments * unit),  # how many partial rows each takes, and their running sum
        Held(segments * unit),
        Held(8),
        Held(partial * unit),
        Held(partial * width * accumulator),
    )


def _embedding_bag_backward(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """As `_embedding_backward`, always sorted (ATen/native/cuda/EmbeddingBag.cu); the maximum needs none."""
    grad, indices, rows, mode = args[0], args[1], args[6], args[8]
    if mode == 2:
        return copies(grad)
    many = indices.numel()
    return (*copies(grad), *_sorted(indices, many), *_partial_rows(indices, many, rows, grad, out))


def _index_put(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """Accumulation sorts the indices (`index_put_with_sort_kernel`, ATen/native/cuda/Indexing.cu).

    A mask becomes the indices of what it lets through, one for each of its dimensions, before anything is
    made (`expandTensors`, ATen/native/IndexingUtils.h).
    """
    x, indices, values, accumulate = args[0], args[1], args[2], argument(args, 3, False)
    given = [index for index in indices if index is not None]
    if not accumulate or not given:
        return ()
    covered = {d for start, index in _places(indices) for d in range(start, start + _width(index))}
    others = [x.shape[d] for d in range(x.dim()) if d not in covered]
    masks = [index for index in given if index.dtype in _MASKS]
    if masks:  # how many they let through shows in the values
        many = values.numel() // max(prod(others), 1)
    else:
        many = prod(broadcast([index.shape for index in given]) or ())
    linear = 8 * many
    element = values.element_size()
    whole = many * prod(others) * element
    copy = () if values.is_contiguous() and tensor_bytes(values) == whole else (Held(whole),)
    return (
        *(Held(linear * mask.dim()) for mask in masks),
        Made.REST,
        Held(linear),
        *copy,
        Held(linear),
        Held(linear),
        linear + radix_sort_bytes(many, 8, 8),
    )


def _places(indices: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
    """Each index with the first dimension that it stands for."""
    start = 0
    for index in indices:
        if index is not None:
            yield start, index
        start += 1 if index is None else _width(index)


def _width(index: Tensor) -> int:
    return index.dim() if index.dtype in _MASKS else 1


RULES: dict[Any, Rule] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
}
