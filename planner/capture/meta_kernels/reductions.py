"""Outputs of frequent operators on `meta`, without the detour through torch's Python decompositions.

torch's own meta kernels answer the same, but many of them are decompositions in Python: a multiplication
takes a tenth of a millisecond there and batch norm a whole one, which is most of a trace. Each shortcut
returns tensors of the shape, dtype and strides of torch's kernel, or NotImplemented for a case that it does
not cover; `tests/capture/meta_kernels/test_meta_kernels.py` holds them against torch's. Where CUDA lays out
its results otherwise than torch's meta kernels, the rule stands in `cuda/layouts.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.cuda import rnn
from planner.capture.meta_kernels import creation as fresh, cuda_layouts as layouts, pointwise
from planner.capture.meta_kernels.pointwise import over_all
from planner.capture.meta_kernels.strides import (
    LAST,
    channels_last,
    contiguous,
    is_plain,
    new,
    suggests_channels_last,
)
from planner.program import Phase

aten = torch.ops.aten


# ---- reductions


def _reduced(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Contiguous, whatever the input (ATen/native/ReduceOpsUtils.h, resize_reduction)."""
    rank = x.dim()
    if not x.is_meta or not x.dtype.is_floating_point or dtype is not None or 0 in x.shape:
        return NotImplemented
    if any(not -rank <= dim < rank for dim in dims or ()):
        return NotImplemented
    gone = {dim % rank for dim in dims} if dims else set(range(rank))
    if dims and len(gone) < len(dims):
        return NotImplemented
    kept = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return new(kept, contiguous(kept), x.dtype)


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
    rows, columns = a.shape[0], b.shape[1]
    return new((rows, columns), (max(columns, 1), 1), a.dtype)


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
    return NotImplemented if 0 in shape else new(shape, contiguous(shape), a.dtype)


# ---- joining and its reverse


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Channels last where all parts suggest it, else contiguous (ATen/native/TensorShape.h,
    cat_compute_output_memory_format); rows of no elements are left out, whatever the rank of the others.
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
    if rank in LAST and all(map(suggests_channels_last, tensors)):
        return new(shape, channels_last(shape), kind)
    return new(shape, contiguous(shape), kind)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    shape, kind, rank = first.shape, first.dtype, first.dim() + 1
    if not -rank <= dim < rank or not is_plain(first):
        return NotImplemented
    if any(t.shape != shape or t.dtype is not kind or not is_plain(t) for t in tensors):
        return NotImplemented
    dim %= rank
    stacked = (*shape[:dim], len(tensors), *shape[dim:])
    return new(stacked, contiguous(stacked), kind)


def _select_backward(grad: Tensor, shape: Sequence[int], dim: int, index: int) -> Any:
    rank = len(shape)
    if not (-rank <= dim < rank and grad.is_meta) or 0 in shape:
        return NotImplemented
    dim %= rank
    expected = [*shape[:dim], *shape[dim + 1 :]]
    if not -shape[dim] <= index < shape[dim] or list(grad.shape) != expected:
        return NotImplemented
    return new(shape, contiguous(shape), grad.dtype)


def _slice_backward(grad: Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    rank = len(shape)
    if not (-rank <= dim < rank and grad.is_meta) or step < 1 or 0 in shape:
        return NotImplemented
    dim %= rank
    taken = len(range(*slice(start, end, step).indices(shape[dim])))
    if list(grad.shape) != [*shape[:dim], taken, *shape[dim + 1 :]]:
        return NotImplemented
    return new(shape, contiguous(shape), grad.dtype)


# ---- the rest


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    fits = is_plain(x) and -x.dim() <= dim < x.dim() and not half_to_float
    return over_all(x) if fits else NotImplemented


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
    fits = is_plain(grad) and is_plain(output) and grad.shape == output.shape
    fits = fits and dtype is grad.dtype is output.dtype
    return over_all(grad, output) if fits and -grad.dim() <= dim < grad.dim() else NotImplemented


def _is_nll(x: Tensor, target: Tensor, weight: Any, reduction: int) -> bool:
    """A loss over rows of scores, summed or averaged."""
    fits = x.dim() == 2 and target.dim() == 1 and x.shape[0] == target.shape[0] and reduction in (1, 2)
    return fits and weight is None and is_plain(x) and x.dtype.is_floating_point and target.is_meta


def _nll_loss(x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> Any:
    if not _is_nll(x, target, weight, reduction):
        return NotImplemented
    return new((), (), x.dtype), new((), (), x.dtype)


def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, total: Tensor
) -> Any:
    if not _is_nll(x, target, weight, reduction) or grad.dim() != 0 or total.dim() != 0:
        return NotImplemented
    return over_all(x)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if not train or not is_plain(x) or not x.dtype.is_floating_point:
        return NotImplemented
    return over_all(x), over_all(x, dtype=torch.bool)


# ---- norms and sampling whose meta kernels are long compositions


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, samples: int, channels: int, area: int,
    groups: int, eps: float,
) -> Any:  # fmt: skip
    """As ATen/native/group_norm.cpp where the input and the parameters have one dtype."""
    if not _fits_group_norm(x, weight, bias, samples, channels, area, groups):
        return NotImplemented
    figures = (samples, groups)
    return over_all(x), new(figures, contiguous(figures), x.dtype), new(figures, contiguous(figures), x.dtype)


def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, samples: int, channels: int,
    area: int, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    fits = _fits_group_norm(x, weight, None, samples, channels, area, groups)
    fits = fits and is_plain(grad) and grad.shape == x.shape and grad.dtype is x.dtype
    for figures in (mean, rstd):
        fits = fits and is_plain(figures) and figures.shape == (samples, groups) and figures.dtype is x.dtype
    if not fits:
        return NotImplemented
    return (
        over_all(x) if mask[0] else None,
        new((channels,), (1,), x.dtype) if mask[1] else None,
        new((channels,), (1,), x.dtype) if mask[2] else None,
    )


def _fits_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, samples: int, channels: int, area: int, groups: int
) -> bool:
    if not is_plain(x) or not x.dtype.is_floating_point or groups < 1 or channels % groups:
        return False
    if x.dim() < 2 or tuple(x.shape[:2]) != (samples, channels) or x.numel() != samples * channels * area:
        return False
    given = [t for t in (weight, bias) if t is not None]
    return all(is_plain(t) and t.shape == (channels,) and t.dtype is x.dtype for t in given)


def _native_batch_norm_backward(*args: Any) -> Any:
    """As in `layouts`, and without parameters (ATen/native/cuda/Normalization.cu)."""
    out = layouts.KERNELS[aten.native_batch_norm_backward.default](*args)
    if out is not NotImplemented:
        return out
    grad, x, weight, mean, var, save_mean, save_invstd, train, _, mask = args
    fits = weight is None and train and list(mask) == [True, False, False] and mean is None and var is None
    fits = fits and is_plain(x) and x.dim() > 1 and is_plain(grad) and grad.shape == x.shape
    for saved in (save_mean, save_invstd):
        fits = fits and is_plain(saved) and saved.shape == x.shape[1:2]
    return (over_all(x), None, None) if fits and grad.dtype is x.dtype else NotImplemented


def _upsample(x: Tensor, size: Sequence[int], *_: Any) -> Any:
    fits = is_plain(x) and x.dim() == len(size) + 2 and x.dtype.is_floating_point and min(size) > 0
    shape = (*x.shape[:2], *size)
    return new(shape, contiguous(shape), x.dtype) if fits else NotImplemented


def _in_place(*_: Any, **__: Any) -> None:
    """An operator that only changes its arguments and has no kernel on meta."""


SHORTCUTS: dict[Any, Callable[..., Any]] = {
    **pointwise.KERNELS,
    **fresh.KERNELS,
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
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
    aten._fused_sgd_.default: _in_place,
    aten._fused_adagrad_.default: _in_place,
    **layouts.KERNELS,
    **rnn.KERNELS,
    aten.native_batch_norm_backward.default: _native_batch_norm_backward,
}


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
    """What the operator gives; `phase` is the loop's."""
    shortcut = SHORTCUTS.get(func)
    if shortcut is not None:
        out = shortcut(*args, **kwargs)
        if out is not NotImplemented:
            return out
    reads = func is aten._local_scalar_dense.default and args[0].is_meta
    if reads and phase is Phase.OPTIMIZER:
        return 1.0  # optimizers read norms, which decide no memory; step counts are on the CPU
    return func(*args, **kwargs) if kwargs else func(*args)
