"""Outputs of reductions and matrix products on `meta`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import empty

aten = torch.ops.aten


def _reduced(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Return a contiguous tensor, whatever the input (ATen/native/ReduceOpsUtils.h, resize_reduction)."""
    rank = x.dim()
    if not x.is_meta or not x.dtype.is_floating_point or dtype is not None or 0 in x.shape:
        return NotImplemented
    if any(not -rank <= dim < rank for dim in dims or ()):
        return NotImplemented
    gone = {dim % rank for dim in dims} if dims else set(range(rank))
    if dims and len(gone) < len(dims):
        return NotImplemented
    kept = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return empty(kept, x.dtype)


def _vector_norm(x: Tensor, order: Any = 2, *dims_and_keepdim: Any, **dtype: Any) -> Any:
    dims = dims_and_keepdim[0] if dims_and_keepdim else None
    gone = [x.shape[dim] for dim in dims if -x.dim() <= dim < x.dim()] if dims else list(x.shape)
    if order != 2 or all(size == 1 for size in gone):  # torch takes the absolute values of single ones
        return NotImplemented
    return _reduced(x, *dims_and_keepdim, **dtype) if dims_and_keepdim else _reduced(x, None, **dtype)


# ---- products


def _mm(a: Tensor, b: Tensor) -> Any:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype is not b.dtype:
        return NotImplemented
    if not a.dtype.is_floating_point or not (a.is_meta and b.is_meta):
        return NotImplemented
    return empty((a.shape[0], b.shape[1]), a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
    if bias.dim() != 1 or bias.dtype is not a.dtype or not bias.is_meta:
        return NotImplemented
    return _mm(a, b) if b.dim() == 2 and bias.shape[0] == b.shape[1] else NotImplemented


def _bmm(a: Tensor, b: Tensor) -> Any:
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return NotImplemented
    if a.dtype is not b.dtype or not a.dtype.is_floating_point or not (a.is_meta and b.is_meta):
        return NotImplemented
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return NotImplemented if 0 in shape else empty(shape, a.dtype)


KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
}
