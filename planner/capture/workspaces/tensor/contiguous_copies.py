"""Workspace rules of kernels whose only workspaces are contiguous copies of operands.

Each kernel calls `contiguous()` internally, which no dispatched operator shows. If a kernel also reads
channels last, only other layouts are copied. A structured kernel gets its outputs before it runs, so copies
come after them. The order was recorded by the allocator of torch 2.13 on an emulated GPU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import suggests_channels_last
from planner.capture.workspaces._rule import (
    argument,
    contiguous_copies,
    copies_in_format_of,
    dense_copies,
    tensor_bytes,
)
from planner.capture.workspaces.ops import Args, Hold, Ops, Output, Outputs, Rule
from planner.program import Target

_OF_CUDNN = (torch.float16, torch.float32, torch.float64)  # dtypes that cuDNN's sampler accepts


def _copies_after(
    copies: Callable[..., Ops], positions: tuple[int, ...], args: Args, out: Any, target: Target
) -> Ops:
    """Return the ops of a kernel: its outputs, then those of `copies` for the arguments at `positions`."""
    tensors = [argument(args, position) for position in positions]
    return (Outputs(), *copies(*(t for t in tensors if isinstance(t, Tensor))))


# ATen/native/cuda: SoftMax.cu, AveragePool3d.cu, Im2Col.cu, Col2Im.cu, DilatedMaxPool3d.cu,
# AdaptiveAveragePooling3d.cu, AdaptiveMaxPooling3d.cu, ReflectionPad.cu, UpSample*.cu, ScanKernels.cpp
_FIRST_CONTIGUOUS = """
    _softmax _log_softmax col2im
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d
    upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward
    _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    upsample_nearest3d_backward _upsample_nearest_exact3d_backward
    upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    cummax cummin avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d_backward adaptive_max_pool3d
"""
# ATen/native/cuda: DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, AveragePool2d.cu, UpSampleNearest2d.cu
_FIRST_DENSE = """
    max_pool2d_with_indices max_pool3d_with_indices avg_pool2d
    upsample_nearest2d upsample_nearest2d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward
"""


def _input_before_output(copies: Callable[..., Ops], args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of adaptive average pooling: a copy of the input if needed, then the output.

    Source: AdaptiveAveragePooling.cu, AdaptiveAveragePooling3d.cu.
    """
    return (*copies(args[0]), Outputs())


def _gradient_like_input(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops that make the outputs, then a copy of the gradient if its format is not the input's.

    Source: DilatedMaxPool3d.cu.
    """
    grad, x = args[:2]
    return (Outputs(), *copies_in_format_of(x, grad))


def _gradient_and_input(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops that make the outputs, then copy input and gradient to one dense format if needed.

    Source: DilatedMaxPool2d.cu, AveragePool2d.cu.
    """
    grad, x = args[:2]
    return (Outputs(), *dense_copies(x), *copies_in_format_of(x, grad))


def _gradient_of_adaptive_pool(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops that make the outputs, then a contiguous copy of the gradient if needed.

    With an input in channels last, the gradient is not copied. Source: AdaptiveAveragePooling.cu.
    """
    grad, x = args[:2]
    return (Outputs(), *(() if suggests_channels_last(x) else contiguous_copies(grad)))


def _gradient_of_adaptive_max_pool(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops that make the outputs, then copy gradient, indices and result if not contiguous.

    Source: AdaptiveMaxPooling2d.cu.
    """
    return (Outputs(), *contiguous_copies(args[0], args[2], out))


def _gradient_of_bilinear(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops for the outputs and a dense copy of the gradient, or () if both have one shape.

    Source: UpSampleBilinear2d.cu.
    """
    return () if args[0].shape == out.shape else (Outputs(), *dense_copies(args[0]))


def _through_contiguous(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops that make the outputs, then copies of outputs and input that are not contiguous.

    Source: AdaptiveMaxPooling2d.cu, UpSampleNearest3d.cu, UpSampleTrilinear3d.cu, UpSampleBilinear2d.cu.
    """
    outputs = out if isinstance(out, tuple) else (out,)
    return (Outputs(), *contiguous_copies(*outputs), *contiguous_copies(args[0]))


def _gradient_of_trilinear(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops that make the outputs, then copies of gradient and output that are not contiguous.

    Source: UpSampleTrilinear3d.cu.
    """
    return (Outputs(), *contiguous_copies(args[0]), *contiguous_copies(out))


def _unfold(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `im2col`: a block of the input's size, a copy of the input, and the output.

    The block is resized to the output; if it is large enough, it is the output (Im2Col.cu).
    """
    x = args[0]
    if tensor_bytes(x) >= tensor_bytes(out):
        return (Outputs(), *contiguous_copies(x))
    return (Hold(tensor_bytes(x)), *contiguous_copies(x), Outputs())


def _running(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops for the output and a copy of the input if it has another type or is not contiguous.

    Source: ReduceOps.cpp.
    """
    x = args[0]
    return (
        (Outputs(), *contiguous_copies(x)) if x.dtype is out.dtype else (Outputs(), Hold(tensor_bytes(out)))
    )


def _nll_loss2d(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `nll_loss2d`: total weight, loss, then contiguous copies (NLLLoss2d.cu)."""
    return (Output(1), Output(), *contiguous_copies(*(t for t in args[:3] if isinstance(t, Tensor))))


def _pack_padded_sequence(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `_pack_padded_sequence`: copies of steps that are joined, and the output.

    Successive steps of equally many samples are copied together if they are not contiguous
    (ATen/native/PackedSequence.cpp).
    """
    x, samples = args[0].transpose(0, 1) if args[2] else args[0], out[1].tolist()
    parts, start = [], 0
    for many, group in groupby(samples):
        end = start + len(list(group))
        parts.append(x[start:end, :many])
        start = end
    return (*contiguous_copies(*parts), Outputs())


def _dropout(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of dropout: the mask, then the output (Dropout.cu, dropout_cuda)."""
    return (Output(1), Output())


def _samples_by_cudnn(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> bool:
    """Return whether `grid_sampler_2d` runs cuDNN's kernel.

    cuDNN supports bilinear mode with zeros as padding and aligned corners, for the dtypes in `_OF_CUDNN`, up
    to 1024 channels and fewer than 2**31 elements. Source: GridSamplerUtils.h.
    """
    is_plain = mode == 0 and padding == 0 and align_corners and x.dtype in _OF_CUDNN
    is_small = is_plain and x.shape[1] <= 1024 and x.numel() < 2**31 and grid.numel() < 2**31
    return bool(is_small and x.numel() > 0)


def _copies_of_repeated(*tensors: Tensor) -> Ops:
    """Return a `Hold` op for the contiguous copy of each tensor that has a stride of 0."""
    return tuple(Hold(tensor_bytes(t)) for t in tensors if any(step == 0 for step in t.stride()))


def _sampling(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `grid_sampler_2d`: copies for cuDNN's kernel, if it runs, and the output.

    Source: cudnn/GridSampler.cpp.
    """
    x, grid = args[:2]
    if not _samples_by_cudnn(*args[:5]):
        return (Outputs(),)
    return (*_copies_of_repeated(x), *contiguous_copies(grid), Outputs())


def _gradient_of_sampling(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `grid_sampler_2d_backward`: the outputs, after copies if cuDNN's kernel runs.

    cuDNN computes the input's gradient even if it is not needed; then the ops hold a block for it.
    """
    grad, x, grid, mode, padding, align_corners, mask = args
    if not _samples_by_cudnn(x, grid, mode, padding, align_corners):
        return (Outputs(),)
    copies = (*_copies_of_repeated(x), *contiguous_copies(grid), *_copies_of_repeated(grad))
    of_x = () if mask[0] else (Hold(tensor_bytes(x)),)
    return (*copies, *of_x, Outputs())


RULES: Mapping[str, Rule] = {
    "grid_sampler_2d": _sampling,
    "grid_sampler_2d_backward": _gradient_of_sampling,
    "native_dropout": _dropout,
    "_pack_padded_sequence": _pack_padded_sequence,
    "nll_loss2d_forward": _nll_loss2d,
    "im2col": _unfold,
    "max_pool2d_with_indices_backward avg_pool2d_backward": _gradient_and_input,
    "max_pool3d_with_indices_backward": _gradient_like_input,
    "upsample_bilinear2d_backward": _gradient_of_bilinear,
    "upsample_trilinear3d_backward": _gradient_of_trilinear,
    "upsample_nearest3d _upsample_nearest_exact3d": _through_contiguous,
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa adaptive_max_pool2d": _through_contiguous,
    "_adaptive_avg_pool2d_backward": _gradient_of_adaptive_pool,
    "adaptive_max_pool2d_backward": _gradient_of_adaptive_max_pool,
    "_adaptive_avg_pool2d": partial(_input_before_output, dense_copies),
    "_adaptive_avg_pool3d": partial(_input_before_output, contiguous_copies),
    "cumsum cumprod logcumsumexp": _running,
    _FIRST_CONTIGUOUS: partial(_copies_after, contiguous_copies, (0,)),
    _FIRST_DENSE: partial(_copies_after, dense_copies, (0,)),
    "_log_softmax_backward_data": partial(_copies_after, contiguous_copies, (0, 1)),
    "nll_loss_forward": partial(_copies_after, contiguous_copies, (0, 1, 2)),
    "nll_loss_backward nll_loss2d_backward": partial(_copies_after, contiguous_copies, (2,)),
}
