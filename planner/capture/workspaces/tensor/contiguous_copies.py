"""Kernels whose only scratch memory is a contiguous copy of an operand that is not.

Each calls `contiguous()` inside, which no operator shows. Where a kernel also reads channels last, only
other layouts are copied.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import suggests_channels_last
from planner.capture.workspaces.steps import Made, Rule, Step, argument, copies, copies_like, packed_copies
from planner.program import Target

aten = torch.ops.aten

Copies = Callable[..., tuple[Step, ...]]


def _copied(
    find: Copies, positions: tuple[int, ...], args: tuple[Any, ...], out: Any, chip: Target
) -> tuple[Step, ...]:
    """Copies of these arguments, taken before the outputs are made."""
    tensors = [argument(args, position) for position in positions]
    found = find(*(t for t in tensors if isinstance(t, Tensor)))
    return (*found, Made.REST) if found else ()


# ATen/native/cuda: SoftMax.cu, NLLLoss.cu, NLLLoss2d.cu, AveragePool3d.cu, ScanKernels.cpp, Im2Col.cu,
# Col2Im.cu, Embedding.cu, DilatedMaxPool3d.cu, AdaptiveAveragePooling3d.cu, ReplicationPadding.cu
_CONTIGUOUS: Mapping[Any, tuple[int, ...]] = {
    aten._softmax.default: (0,),
    aten._log_softmax.default: (0,),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.nll_loss_forward.default: (0, 1, 2),
    aten.nll_loss_backward.default: (2,),
    aten.nll_loss2d_backward.default: (2,),
    aten.avg_pool3d.default: (0,),
    aten.avg_pool3d_backward.default: (0,),
    aten._adaptive_avg_pool3d_backward.default: (0,),
    aten.im2col.default: (0,),
    aten.col2im.default: (0,),
    aten.replication_pad1d_backward.default: (0,),
    aten.replication_pad2d_backward.default: (0,),
    aten.replication_pad3d_backward.default: (0,),
    aten.reflection_pad1d.default: (0,),
    aten.reflection_pad1d_backward.default: (0,),
    aten.reflection_pad2d.default: (0,),
    aten.reflection_pad2d_backward.default: (0,),
    aten.reflection_pad3d.default: (0,),
    aten.reflection_pad3d_backward.default: (0,),
    aten.upsample_linear1d_backward.default: (0,),
    aten.upsample_nearest1d.default: (0,),
    aten.upsample_nearest1d_backward.default: (0,),
    aten.upsample_trilinear3d_backward.default: (0,),
    aten.upsample_nearest3d.default: (0,),
    aten.upsample_nearest3d_backward.default: (0,),
    aten.upsample_bicubic2d_backward.default: (0,),
    aten._upsample_bilinear2d_aa_backward.default: (0,),
    aten._upsample_bicubic2d_aa_backward.default: (0,),
    aten.cumsum.default: (0,),
    aten.cumprod.default: (0,),
    aten.logcumsumexp.default: (0,),
    aten.cummax.default: (0,),
    aten.cummin.default: (0,),
}

# ATen/native/cuda: DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu, UpSampleNearest2d.cu,
# UpSampleBilinear2d.cu
_PACKED: Mapping[Any, tuple[int, ...]] = {
    aten.max_pool2d_with_indices.default: (0,),
    aten.avg_pool2d.default: (0,),
    aten._adaptive_avg_pool2d.default: (0,),
    aten.upsample_nearest2d.default: (0,),
    aten.max_pool3d_with_indices.default: (0,),
}


def _gradient_like_input(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The gradient in the input's format (DilatedMaxPool2d.cu, AveragePool2d.cu)."""
    grad, x = args[:2]
    return (*copies_like(x, grad), Made.REST)


def _gradient_of_adaptive_pool(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """With channels last any strides will do (AdaptiveAveragePooling.cu)."""
    grad, x = args[:2]
    return (*(() if suggests_channels_last(x) else copies(grad)), Made.REST)


def _gradient_after_output(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """A packed gradient beside the output (UpSampleNearest2d.cu)."""
    return (Made.REST, *packed_copies(args[0]))


def _gradient_of_bilinear(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The same; a gradient of the output's size is copied as it is (UpSampleBilinear2d.cu)."""
    return () if args[0].shape == out.shape else _gradient_after_output(args, out, chip)


def _nll_loss2d(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Copies of what is not contiguous; the total weight is made before the loss (NLLLoss2d.cu)."""
    return (Made.SECOND, Made.OUTPUT, *copies(*(t for t in args[:3] if isinstance(t, Tensor))))


def _dropout(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The mask is made before the output (Dropout.cu, dropout_cuda)."""
    return (Made.SECOND, Made.OUTPUT)


RULES: Mapping[Any, Rule] = {
    aten.native_dropout.default: _dropout,
    aten.nll_loss2d_forward.default: _nll_loss2d,
    aten.max_pool3d_with_indices_backward.default: _gradient_like_input,
    aten.upsample_nearest2d_backward.default: _gradient_after_output,
    aten.upsample_bilinear2d_backward.default: _gradient_of_bilinear,
    aten.max_pool2d_with_indices_backward.default: _gradient_like_input,
    aten.avg_pool2d_backward.default: _gradient_like_input,
    aten._adaptive_avg_pool2d_backward.default: _gradient_of_adaptive_pool,
    aten.adaptive_max_pool2d_backward.default: _gradient_of_adaptive_pool,
    **{func: partial(_copied, copies, positions) for func, positions in _CONTIGUOUS.items()},
    **{func: partial(_copied, packed_copies, positions) for func, positions in _PACKED.items()},
}
