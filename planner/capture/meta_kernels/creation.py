"""Outputs of factories, `clone` and `to` on `meta`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import contiguous, empty, empty_strided, is_dense

aten = torch.ops.aten

_AS_NEW = (None, torch.contiguous_format)
_AS_IT_IS = (None, torch.preserve_format)


def _like(
    x: Tensor, *, dtype: torch.dtype | None = None, layout: Any = None, device: torch.device | None = None,
    pin_memory: bool | None = None, non_blocking: bool = False, memory_format: Any = None,
) -> Any:  # fmt: skip
    """Return a tensor like another one, by default with its strides where it is dense (`empty_like`,
    ATen/native/TensorFactories.cpp; `to` and `clone` use it).
    """
    shape = x.shape
    if not x.is_meta or pin_memory or 0 in shape or layout not in (None, torch.strided):
        return NotImplemented
    if device is not None and device.type != "meta":
        return NotImplemented
    strides = x.stride()
    plain = contiguous(shape)
    if memory_format is torch.contiguous_format or strides == plain:
        fits = memory_format in (*_AS_IT_IS, torch.contiguous_format)
        strides = plain
    else:
        fits = memory_format in _AS_IT_IS and 1 not in shape and is_dense(shape, strides)
    return empty_strided(shape, strides, dtype or x.dtype) if fits else NotImplemented


def _full_like(x: Tensor, value: Any, **options: Any) -> Any:
    return _like(x, **options)


def _sized(
    size: Sequence[int], *, dtype: torch.dtype | None = None, layout: Any = None,
    device: torch.device | None = None, pin_memory: bool | None = None, memory_format: Any = None,
) -> Any:  # fmt: skip
    """Return a contiguous tensor, by default of torch's default dtype."""
    if device is None or device.type != "meta" or pin_memory or layout not in (None, torch.strided):
        return NotImplemented
    if memory_format not in _AS_NEW or (0 in size and len(size) > 1) or (size and min(size) < 0):
        return NotImplemented
    return empty(size, dtype or torch.get_default_dtype())


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return NotImplemented if dtype is None else _sized(size, dtype=dtype, **options)


def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return _sized((), dtype=dtype, **options)


def _sized_beside(
    x: Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Return a contiguous tensor, by default of another one's dtype and device."""
    return _sized(size, dtype=dtype or x.dtype, device=device or x.device, **options)


KERNELS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.clone.default,
            aten._to_copy.default,
        ),
        _like,
    ),
    aten.full_like.default: _full_like,
    **dict.fromkeys((aten.zeros.default, aten.ones.default, aten.empty.memory_format), _sized),
    aten.full.default: _full,
    aten.scalar_tensor.default: _scalar_tensor,
    **dict.fromkeys((aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default), _sized_beside),
}  # fmt: skip
