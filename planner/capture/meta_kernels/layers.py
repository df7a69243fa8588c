"""Outputs of layers and losses on `meta`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.pointwise import pointwise_output
from planner.capture.meta_kernels.strides import empty, is_contiguous_meta

aten = torch.ops.aten


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    fits = is_contiguous_meta(x) and -x.dim() <= dim < x.dim() and not half_to_float
    return pointwise_output(x) if fits else NotImplemented


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
    fits = is_contiguous_meta(grad) and is_contiguous_meta(output) and grad.shape == output.shape
    fits = fits and dtype is grad.dtype is output.dtype
    return pointwise_output(grad, output) if fits and -grad.dim() <= dim < grad.dim() else NotImplemented


def _is_nll(x: Tensor, target: Tensor, weight: Any, reduction: int) -> bool:
    """Return whether this is a loss over rows of scores, summed or averaged."""
    fits = x.dim() == 2 and target.dim() == 1 and x.shape[0] == target.shape[0] and reduction in (1, 2)
    return fits and weight is None and is_contiguous_meta(x) and x.dtype.is_floating_point and target.is_meta


def _nll_loss(x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> Any:
    if not _is_nll(x, target, weight, reduction):
        return NotImplemented
    return empty((), x.dtype), empty((), x.dtype)


def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, total: Tensor
) -> Any:
    if not _is_nll(x, target, weight, reduction) or grad.dim() != 0 or total.dim() != 0:
        return NotImplemented
    return pointwise_output(x)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if not train or not is_contiguous_meta(x) or not x.dtype.is_floating_point:
        return NotImplemented
    return pointwise_output(x), pointwise_output(x, dtype=torch.bool)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, samples: int, channels: int, area: int,
    groups: int, eps: float,
) -> Any:  # fmt: skip
    """Follow ATen/native/group_norm.cpp where the input and the parameters have one dtype."""
    if not _fits_group_norm(x, weight, bias, samples, channels, area, groups):
        return NotImplemented
    statistics = (samples, groups)
    return pointwise_output(x), empty(statistics, x.dtype), empty(statistics, x.dtype)


def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, samples: int, channels: int,
    area: int, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    fits = _fits_group_norm(x, weight, None, samples, channels, area, groups)
    fits = fits and is_contiguous_meta(grad) and grad.shape == x.shape and grad.dtype is x.dtype
    for statistics in (mean, rstd):
        fits = (
            fits
            and is_contiguous_meta(statistics)
            and statistics.shape == (samples, groups)
            and statistics.dtype is x.dtype
        )
    if not fits:
        return NotImplemented
    return (
        pointwise_output(x) if mask[0] else None,
        empty((channels,), x.dtype) if mask[1] else None,
        empty((channels,), x.dtype) if mask[2] else None,
    )


def _fits_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, samples: int, channels: int, area: int, groups: int
) -> bool:
    if not is_contiguous_meta(x) or not x.dtype.is_floating_point or groups < 1 or channels % groups:
        return False
    if x.dim() < 2 or tuple(x.shape[:2]) != (samples, channels) or x.numel() != samples * channels * area:
        return False
    given = [t for t in (weight, bias) if t is not None]
    return all(is_contiguous_meta(t) and t.shape == (channels,) and t.dtype is x.dtype for t in given)


def _upsample(x: Tensor, size: Sequence[int], *_: Any) -> Any:
    fits = is_contiguous_meta(x) and x.dim() == len(size) + 2 and x.dtype.is_floating_point and min(size) > 0
    shape = (*x.shape[:2], *size)
    return empty(shape, x.dtype) if fits else NotImplemented


KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten._log_softmax.default: _softmax,
    aten._softmax.default: _softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.native_dropout.default: _native_dropout,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.upsample_bilinear2d.default: _upsample,
    aten.upsample_trilinear3d.default: _upsample,
}
