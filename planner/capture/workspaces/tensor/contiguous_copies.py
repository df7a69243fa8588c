"""Workspaces of kernels that copy operands to be contiguous and allocate nothing else.

Each calls `contiguous()` inside, which no operator shows. Where a kernel also reads channels last, only
other layouts are copied.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from planner.capture.meta_kernels.strides import suggests_channels_last
from planner.capture.workspaces._rule import argument, contiguous_copies, copies_in_format_of, dense_copies
from planner.capture.workspaces.ops import Args, Ops, Output, Outputs, Rule
from planner.program import Target


def _copies_of(
    copies: Callable[..., Ops], positions: tuple[int, ...], args: Args, out: Any, target: Target
) -> Ops:
    """Copy these arguments before the outputs are made."""
    tensors = [argument(args, position) for position in positions]
    copied = copies(*(t for t in tensors if isinstance(t, Tensor)))
    return (*copied, Outputs()) if copied else ()


# ATen/native/cuda: SoftMax.cu, NLLLoss.cu, NLLLoss2d.cu, AveragePool3d.cu, ScanKernels.cpp, Im2Col.cu,
# Col2Im.cu, Embedding.cu, DilatedMaxPool3d.cu, AdaptiveAveragePooling3d.cu, ReplicationPadding.cu
_FIRST_CONTIGUOUS = """
    _softmax _log_softmax _adaptive_avg_pool3d_backward im2col col2im
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    reflection_pad3d reflection_pad3d_backward
    upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_trilinear3d_backward
    upsample_nearest3d upsample_nearest3d_backward upsample_bicubic2d_backward
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    cumsum cumprod logcumsumexp cummax cummin
"""
# ATen/native/cuda: DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu, UpSampleNearest2d.cu,
# UpSampleBilinear2d.cu
_FIRST_DENSE = """
    max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d upsample_nearest2d max_pool3d_with_indices
"""


def _gradient_like_input(args: Args, out: Any, target: Target) -> Ops:
    """Copy the gradient to the input's format (DilatedMaxPool2d.cu, AveragePool2d.cu)."""
    grad, x = args[:2]
    return (*copies_in_format_of(x, grad), Outputs())


def _gradient_of_adaptive_pool(args: Args, out: Any, target: Target) -> Ops:
    """Copy the gradient unless the input is channels last (AdaptiveAveragePooling.cu)."""
    grad, x = args[:2]
    return (*(() if suggests_channels_last(x) else contiguous_copies(grad)), Outputs())


def _gradient_after_output(args: Args, out: Any, target: Target) -> Ops:
    """Copy the gradient to a dense format beside the output (UpSampleNearest2d.cu)."""
    return (Outputs(), *dense_copies(args[0]))


def _input_after_output(args: Args, out: Any, target: Target) -> Ops:
    """Copy the input, or the gradient, beside the output (AveragePool3d.cu)."""
    return (Outputs(), *contiguous_copies(args[0]))


def _gradient_of_bilinear(args: Args, out: Any, target: Target) -> Ops:
    """Copy the gradient likewise, unless it has the output's size (UpSampleBilinear2d.cu)."""
    return () if args[0].shape == out.shape else _gradient_after_output(args, out, target)


def _nll_loss2d(args: Args, out: Any, target: Target) -> Ops:
    """Make the total weight before the loss, then the copies (NLLLoss2d.cu)."""
    return (Output(1), Output(), *contiguous_copies(*(t for t in args[:3] if isinstance(t, Tensor))))


def _dropout(args: Args, out: Any, target: Target) -> Ops:
    """Make the mask before the output (Dropout.cu, dropout_cuda)."""
    return (Output(1), Output())


RULES: Mapping[str, Rule] = {
    "native_dropout": _dropout,
    "nll_loss2d_forward": _nll_loss2d,
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward": _gradient_like_input,
    "avg_pool2d_backward": _gradient_like_input,
    "upsample_nearest2d_backward": _gradient_after_output,
    "upsample_bilinear2d_backward": _gradient_of_bilinear,
    "_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward": _gradient_of_adaptive_pool,
    "avg_pool3d avg_pool3d_backward": _input_after_output,
    _FIRST_CONTIGUOUS: partial(_copies_of, contiguous_copies, (0,)),
    _FIRST_DENSE: partial(_copies_of, dense_copies, (0,)),
    "_log_softmax_backward_data": partial(_copies_of, contiguous_copies, (0, 1)),
    "nll_loss_forward": partial(_copies_of, contiguous_copies, (0, 1, 2)),
    "nll_loss_backward nll_loss2d_backward": partial(_copies_of, contiguous_copies, (2,)),
}
