"""Workspace rules of normalization layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import is_in_format, suggests_channels_last
from planner.capture.workspaces._rule import (
    accumulator_bytes,
    ceil_div,
    contiguous_copies,
    copies_in_format_of,
    floor_power_of_2,
    released,
    tensor_bytes,
)
from planner.capture.workspaces.ops import Args, Hold, Op, Ops, Output, Outputs, ReleaseBeneath, Rule
from planner.capture.workspaces.tensor.reductions import Dense, reduction
from planner.program import Target

# ---- layer norm and RMS norm: ATen/native/cuda/layer_norm_kernel.cu


def _layer_norm(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of layer norm: copies of operands that are not contiguous, then the outputs."""
    x, _, weight, bias = args[:4]
    return (*contiguous_copies(x, weight, bias), Outputs())


def _rms_norm(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of RMS norm: copies of operands that are not contiguous, then the outputs."""
    return (*contiguous_copies(args[0], args[2]), Outputs())


def _layer_norm_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of layer norm's backward pass (`_normalized_backward`)."""
    grad, x, normalized, _, _, weight, _, mask = args
    return _normalized_backward(grad, x, normalized, weight, out, mask, target)


def _rms_norm_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of RMS norm's backward pass (`_normalized_backward`)."""
    grad, x, normalized, _, weight, mask = args
    return _normalized_backward(grad, x, normalized, weight, out, mask, target)


_MANY_ROWS = 64 * 1024
_ROWS_PER_BLOCK = 32
_MAX_BLOCKS = 64 * 1024 // 2


def _normalized_backward(
    grad: Tensor, x: Tensor, normalized: Sequence[int], weight: Tensor | None, out: Any,
    mask: Sequence[bool], target: Target,
) -> Ops:  # fmt: skip
    """Return the ops of layer norm's or RMS norm's backward pass: copies, outputs and partial sums.

    With many rows, partial sums are allocated per block of rows (`LaunchGammaBetaBackwardCUDAKernel`). Their
    sum is a new tensor, after which the tensor first made for the gradient is freed.
    """
    columns = x.shape[x.dim() - len(normalized) :].numel()
    rows = x.numel() // max(columns, 1)
    scales = [t for t, is_needed in zip(out[1:], mask[1:], strict=True) if is_needed and t is not None]
    ops: list[Op] = [*contiguous_copies(x, weight), *([Output()] if mask[0] else [])]
    few = rows <= _MANY_ROWS or columns // 32 >= target.sm_count // 2
    if few or not scales:
        return (*ops, Outputs(), *contiguous_copies(grad))
    blocks = min(_MAX_BLOCKS // ceil_div(columns, 32), ceil_div(rows, _ROWS_PER_BLOCK))
    ops += [Hold(tensor_bytes(t)) for t in scales]
    above = (*contiguous_copies(grad), *(Hold(blocks * columns * t.element_size()) for t in scales))
    ops += above
    summed = reduction(Dense((blocks, columns)), [0], 4, target)
    for left in reversed(range(len(scales))):
        ops += [Output(), *summed, *released(summed), ReleaseBeneath(left + len(above))]
    return tuple(ops)


# ---- group norm: ATen/native/cuda/group_norm_kernel.cu


def _group_norm(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of group norm: the outputs, then scale and shift of every sample and channel.

    With channels last, moments of rows come before. Since `_EXACT_MOMENTS`, inputs of half precision also
    have mean and deviation in float32.
    """
    x, weight, bias, samples, channels, pixels, groups = args[:7]
    ops: list[Op] = [Outputs()]
    if x.dtype.itemsize == 2 and target.torch >= _EXACT_MOMENTS:
        ops += [Hold(samples * groups * accumulator_bytes(x))] * 2
    if suggests_channels_last(x):
        ops.append(samples * groups * _closest_factor(pixels) * _WELFORD_BYTES)
    if pixels > 1 and (weight is not None or bias is not None):
        ops += [Hold(samples * channels * accumulator_bytes(x))] * 2
    return tuple(ops)


def _group_norm_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of group norm's backward pass: the outputs, sums, and coefficients of the gradient.

    The sums are of grad * x and of grad per sample and channel.
    """
    _, x, _, _, weight, samples, channels, pixels, groups, mask = args
    unit = accumulator_bytes(x)
    ops: list[Op] = [Outputs(), Hold(samples * channels * unit), Hold(samples * channels * unit)]
    if pixels > 1 and suggests_channels_last(x):
        ops.append(2 * samples * channels * _closest_factor(pixels) * unit)
    if mask[0]:
        ops += [Hold(samples * groups * unit)] * 2
        if pixels > 1 and weight is not None:
            ops.append(Hold(samples * channels * unit))
    return tuple(ops)


_EXACT_MOMENTS = (2, 13)  # pytorch/pytorch#183946
_WELFORD_BYTES = 24  # mean, sum of squares, a 64-bit count, and the count as a float


def _closest_factor(number: int) -> int:
    """Return the largest divisor of a number up to its square root (`ClosestFactor`)."""
    factor = int(number**0.5)
    while number % factor:
        factor -= 1
    return factor


# ---- batch norm: ATen/native/cudnn/BatchNorm.cpp, ATen/native/cuda/Normalization.cu and .cuh


def is_cudnn_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool) -> bool:
    """Return whether cuDNN runs a batch norm.

    The epsilon is assumed to be at least 1e-5. Source: `_select_batch_norm_backend`.
    """
    if weight is None or bias is None or x.dim() < 3:
        return False
    if torch.bfloat16 in (x.dtype, weight.dtype):
        return False
    if x.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    return x.shape[0] <= (880801 if training else 65535) and x.numel() < 2**31 - 1


def _batch_norm(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of batch norm in training, cuDNN's or PyTorch's, or () in evaluation.

    PyTorch's kernel for channels last allocates partial moments. Other layouts that are not contiguous, among
    them volumes in channels last, and tensors beyond 32-bit indices are reduced to mean and variance;
    bfloat16 is converted to float32 first (`batch_norm_choose_impl`, `batch_norm_mean_var`).
    """
    x, weight, bias, _, _, training = args[:6]
    if not training:
        return ()
    if is_cudnn_batch_norm(x, weight, bias, training):
        return _cudnn_moments(x, 516, 64 if x.dtype is torch.float32 else 160, 1072)
    is_short = x.numel() < 2**31 - 1
    if is_short and (x.is_contiguous() or (x.dim() == 4 and is_in_format(x.shape, x.stride(), is_last=True))):
        return _partial_moments(x, 4)
    copy = (Hold(4 * x.numel()),) if x.dtype is torch.bfloat16 else ()
    return (Outputs(), *copy, *reduction(x, [d for d in range(x.dim()) if d != 1], 16, target))


def _batch_norm_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of batch norm's backward pass, cuDNN's or PyTorch's, or () if PyTorch's needs none.

    cuDNN copies the gradient to the input's format. PyTorch's kernel for channels last holds sums until it
    has made its last output, the input's gradient. Source: Normalization.cuh,
    batch_norm_backward_reduce_cuda_channels_last_template.
    """
    grad, x, weight = args[:3]
    training = args[7]
    if training and is_cudnn_batch_norm(x, weight, weight, training):
        return (*copies_in_format_of(x, grad), *_cudnn_moments(x, 512, 96, 1056))
    if not training or not _reads_channels_last(x):
        return ()
    sums = Hold(x.shape[1] * accumulator_bytes(x))
    partial = _partial_moments(x, 2) if _reads_channels_last(grad) else ()
    first = Output() if out[0] is None else Output(1)
    scales = (first,) * sum(t is not None for t in out[1:])
    return (sums, sums, *scales, *partial, *released(partial), Outputs())


def _cudnn_moments(x: Tensor, block_bytes: int, block_rows: int, bytes_: int) -> Ops:
    """Return the ops of cuDNN's batch norm: the outputs and, if the input is channels last, a workspace.

    The workspace is of CUDNN_BATCHNORM_SPATIAL_PERSISTENT, which torch uses only in training with channels
    last. All 8,316 sizes that cuDNN 9.19 gave on an H200 follow this rule (benchmarks/measured), which is
    assumed for other GPUs and versions.
    """
    if not suggests_channels_last(x):
        return (Outputs(),)
    channels = x.shape[1]
    groups = ceil_div(channels, 64)
    blocks = ceil_div(x.numel() // max(channels, 1), block_rows)
    return Outputs(), Hold(bytes_ + groups * (4 + block_bytes * blocks))


def _partial_moments(x: Tensor, values: int) -> Ops:
    """Return the ops that hold batch norm's partial moments, or () if there are none.

    Kernels for channels last hold staging data and semaphores, unless one block of threads sums all rows.
    Source: `flexible_launch_configs`.
    """
    if not _reads_channels_last(x):
        return ()
    channels = x.shape[1]
    rows = x.numel() // max(channels, 1)
    block_x = min(floor_power_of_2(channels), 32)
    block_y = min(floor_power_of_2(ceil_div(rows, 16)), 512 // block_x)
    if block_x * block_y != 512:
        block_x = min(floor_power_of_2(channels), 512 // block_y)
    grid_y = min(ceil_div(rows, block_y * 16), 128)
    if grid_y < 8:
        return ()
    return Hold(values * channels * grid_y * accumulator_bytes(x)), Hold(4 * ceil_div(channels, block_x))


def _reads_channels_last(x: Tensor) -> bool:
    """Return whether batch norm runs its kernels for channels last on a tensor.

    Source: `batch_norm_choose_impl`. The kernels also run for matrices and for images of one pixel.
    """
    return x.stride(1) == 1 or suggests_channels_last(x)


RULES: dict[str, Rule] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}
