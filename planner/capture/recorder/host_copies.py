"""Compute the temporary GPU blocks of copies between GPU and CPU.

A copy is a single transfer if both tensors have the same dtype and the same dense layout. Otherwise
ATen/native/cuda/Copy.cu (`copy_requires_temporaries`) makes contiguous copies first, and converts the dtype
on the CPU, or on the GPU if the copy is non-blocking.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import contiguous, is_dense, is_in_format
from planner.capture.workspaces._rule import tensor_bytes
from planner.capture.workspaces.ops import Hold, Ops, ReleaseBeneath

_aten = torch.ops.aten


def staging_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, host: Any) -> Ops:
    """Return the ops of temporary GPU blocks for a copy between GPU and CPU, or () if there are none.

    Operators other than such copies need none. `host` contains the CPU tensors, including the result `out` of
    a conversion if `out` is on the CPU.
    """
    if func is _aten.copy_.default:
        given, source = args[0], args[1]
        is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    elif func is _aten._to_copy.default:
        given, source, is_async = out, args[0], kwargs.get("non_blocking", False)
    else:
        return ()
    if not (given.is_meta and source.is_meta) or (given in host) == (source in host) or not given.numel():
        return ()
    if given.dtype == source.dtype and _have_one_layout(given, source):
        return ()
    return _to_cpu(given, source, is_async) if given in host else _to_gpu(given, source, is_async)


def _to_cpu(given: Tensor, source: Tensor, is_async: bool) -> Ops:
    is_broadcast = source.shape != given.shape
    if not is_async or given.dtype == source.dtype:
        return _contiguous_copy(source, given, source.dtype, is_broadcast)
    converted = Hold(source.numel() * given.element_size())
    strides = source.stride() if is_dense(source.shape, source.stride()) else contiguous(source.shape)
    if is_broadcast or not is_in_format(source.shape, strides, is_last=False):
        return (converted, Hold(tensor_bytes(given)), ReleaseBeneath(1))
    return (converted,)


def _contiguous_copy(source: Tensor, given: Tensor, dtype: torch.dtype, is_broadcast: bool) -> Ops:
    is_copied = is_broadcast or not source.is_contiguous()
    return (Hold(given.numel() * dtype.itemsize),) if is_copied else ()


def _to_gpu(given: Tensor, source: Tensor, is_async: bool) -> Ops:
    dtype = source.dtype if is_async else given.dtype
    if given.is_contiguous() and given.dtype == dtype:
        return ()
    return (Hold(given.numel() * dtype.itemsize),)


def _have_one_layout(given: Tensor, source: Tensor) -> bool:
    if given.shape != source.shape or not is_dense(given.shape, given.stride()):
        return False
    return _strides_that_count(given) == _strides_that_count(source)


def _strides_that_count(tensor: Tensor) -> Sequence[int]:
    """Return a tensor's strides in dimensions larger than 1."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
