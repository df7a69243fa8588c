"""Outputs of joining and slicing on `meta`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import (
    CHANNELS_LAST,
    channels_last,
    empty,
    empty_strided,
    is_contiguous_meta,
    suggests_channels_last,
)

aten = torch.ops.aten


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Return channels last where all parts suggest it, else contiguous (ATen/native/TensorShape.h,
    cat_compute_output_memory_format); empty vectors are left out, whatever the rank of the others.
    """
    kind = tensors[0].dtype
    if any(t.dtype is not kind or not t.is_meta for t in tensors):
        return NotImplemented
    parts = [t for t in tensors if t.dim() != 1 or t.shape[0]]
    rank = parts[0].dim() if parts else 0
    if not -rank <= dim < rank or any(t.dim() != rank for t in parts):
        return NotImplemented
    dim %= rank
    shape = list(parts[0].shape)
    rest = shape[:dim], shape[dim + 1 :]
    shape[dim] = 0
    for t in parts:
        own = list(t.shape)
        if (own[:dim], own[dim + 1 :]) != rest or 0 in own:
            return NotImplemented
        shape[dim] += own[dim]
    if rank in CHANNELS_LAST and all(map(suggests_channels_last, tensors)):
        return empty_strided(shape, channels_last(shape), kind)
    return empty(shape, kind)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    shape, kind, rank = first.shape, first.dtype, first.dim() + 1
    if not -rank <= dim < rank or not is_contiguous_meta(first):
        return NotImplemented
    if any(t.shape != shape or t.dtype is not kind or not is_contiguous_meta(t) for t in tensors):
        return NotImplemented
    dim %= rank
    return empty((*shape[:dim], len(tensors), *shape[dim:]), kind)


def _zero_padded(grad: Tensor, shape: Sequence[int], *_: Any) -> Any:
    """Return a contiguous gradient of the whole input from that of a part."""
    return empty(shape, grad.dtype) if grad.is_meta and 0 not in shape else NotImplemented


KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.select_backward.default: _zero_padded,
    aten.slice_backward.default: _zero_padded,
}
