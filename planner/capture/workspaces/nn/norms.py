"""Scratch memory of normalisation layers."""

from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import LAST, suggests_channels_last
from planner.capture.workspaces.steps import (
    Held,
    Made,
    Release,
    Rule,
    Step,
    copies,
    copies_like,
    released,
    tensor_bytes,
)
from planner.capture.workspaces.tensor.reductions import Matrix, reduction
from planner.program import Target

aten = torch.ops.aten


def _accumulator_bytes(x: Tensor) -> int:
    return 8 if x.dtype is torch.float64 else 4


# ---- layer norm: ATen/native/cuda/layer_norm_kernel.cu


def _layer_norm(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Contiguous copies of what is not, made before the outputs and held beside them."""
    x, _, weight, bias = args[:4]
    return (*copies(x, weight, bias), Made.REST)


def _rms_norm(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    return (*copies(args[0], args[2]), Made.REST)


def _layer_norm_backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    grad, x, normalized, _, _, weight, _, mask = args
    rows, columns = _rows_and_columns(x, len(normalized))
    wanted = [t for t, asked in zip(out[1:], mask[1:], strict=True) if asked and t is not None]
    first = (Made.OUTPUT,) if mask[0] else ()
    return (
        *copies(x, weight), *first, *_gradients_of_scale(wanted, grad, rows, columns, chip)
    )  # fmt: skip


def _rms_norm_backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    grad, x, normalized, _, weight, mask = args
    rows, columns = _rows_and_columns(x, len(normalized))
    wanted = [out[1]] if mask[1] and out[1] is not None else []
    first = (Made.OUTPUT,) if mask[0] else ()
    return (
        *copies(x, weight), *first, *_gradients_of_scale(wanted, grad, rows, columns, chip)
    )  # fmt: skip


def _rows_and_columns(x: Tensor, normalized: int) -> tuple[int, int]:
    columns = x.shape[x.dim() - normalized :].numel()
    return x.numel() // max(columns, 1), columns


_MANY_ROWS = 64 * 1024
_ROWS_PER_BLOCK = 32
_MAX_BLOCKS = 64 * 1024 // 2


def _gradients_of_scale(
    wanted: list[Tensor], grad: Tensor, rows: int, columns: int, chip: Target
) -> tuple[Step, ...]:
    """`LaunchGammaBetaBackwardCUDAKernel`: with many rows, partial sums per block of rows, then their sum.

    The sum makes the gradient anew; what was made for it first is dropped only then.
    """
    few = rows <= _MANY_ROWS or columns // 32 >= chip.sm_count // 2
    if few or not wanted:
        return (Made.REST, *copies(grad))
    blocks = min(_MAX_BLOCKS // -(-columns // 32), -(-rows // _ROWS_PER_BLOCK))
    steps: list[Step] = [Held(tensor_bytes(t)) for t in wanted]
    steps += copies(grad)
    steps += [Held(blocks * columns * t.element_size()) for t in wanted]
    for _ in wanted:
        summed = reduction(Matrix(blocks, columns), [0], 4, chip)
        steps += [Made.OUTPUT, *summed, Release(len(summed))]
    return tuple(steps)


# ---- group norm: ATen/native/cuda/group_norm_kernel.cu


def _group_norm(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Scale and shift of every sample and channel; with channels last, moments of rows before."""
    x, weight, bias, samples, channels, pixels, groups = args[:7]
    steps: list[Step] = [Made.REST]
    if _is_channels_last(x):
        steps.append(samples * groups * _closest_factor(pixels) * _WELFORD_BYTES)
    if pixels > 1 and (weight is not None or bias is not None):
        steps += [Held(samples * channels * _accumulator_bytes(x))] * 2
    return tuple(steps)


def _group_norm_backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Sums of grad * x and of grad per sample and channel, then the coefficients of the gradient."""
    _, x, _, _, weight, samples, channels, pixels, groups, mask = args
    unit = _accumulator_bytes(x)
    steps: list[Step] = [Made.REST, Held(samples * channels * unit), Held(samples * channels * unit)]
    if pixels > 1 and _is_channels_last(x):
        steps.append(2 * samples * channels * _closest_factor(pixels) * unit)
    if mask[0]:
        if pixels > 1 and weight is not None:
            steps.append(Held(samples * channels * unit))
        steps += [Held(samples * groups * unit)] * 2
    return tuple(steps)


_WELFORD_BYTES = 24  # mean, squares, a 64-bit count, count as a float


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() in LAST and suggests_channels_last(x)


def _closest_factor(number: int) -> int:
    """The largest divisor up to the square root (`ClosestFactor`)."""
    found = int(number**0.5)
    while number % found:
        found -= 1
    return found


# ---- batch norm: ATen/native/cudnn/BatchNorm.cpp, ATen/native/cuda/Normalization.cu and .cuh


def is_cudnn_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool) -> bool:
    """`_select_batch_norm_backend` of ATen/native/Normalization.cpp, for an epsilon of at least 1e-5."""
    if weight is None or bias is None or x.dim() < 3:
        return False
    if torch.bfloat16 in (x.dtype, weight.dtype):
        return False
    if x.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    return x.shape[0] <= (880801 if training else 65535) and x.numel() < 2**31 - 1


def _batch_norm(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """cuDNN's workspace and reserve for the plain operation are taken for nothing, which measured peaks of
    models with batch norm bear out; the native kernel for channels last takes partial moments.
    """
    x, weight, bias, _, _, training = args[:6]
    if is_cudnn_batch_norm(x, weight, bias, training) or not training:
        return ()
    return _partial_moments(x, 4)


def _batch_norm_backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The native kernel for channels last makes the input's gradient last, from sums that it holds
    (Normalization.cuh, batch_norm_backward_reduce_cuda_channels_last_template).
    """
    grad, x, weight = args[:3]
    training = args[7]
    if training and is_cudnn_batch_norm(x, weight, weight, training):
        return (*copies_like(x, grad), Made.REST)
    if not training:
        return ()
    if not _reads_channels_last(x):
        return ()
    sums = Held(x.shape[1] * _accumulator_bytes(x))
    steps = _partial_moments(x, 2) if _reads_channels_last(grad) else ()
    first = Made.OUTPUT if out[0] is None else Made.SECOND
    scales = (first,) * sum(t is not None for t in out[1:])
    return (sums, sums, *scales, *steps, *released(steps), Made.REST)


def _partial_moments(x: Tensor, values: int) -> tuple[Step, ...]:
    """`flexible_launch_configs` for the kernels that read channels last; staging data and semaphores."""
    if not _reads_channels_last(x):
        return ()
    channels = x.shape[1]
    rows = x.numel() // max(channels, 1)
    block_x = min(_power(channels), 32)
    block_y = min(_power(-(-rows // 16)), 512 // block_x)
    if block_x * block_y != 512:
        block_x = min(_power(channels), 512 // block_y)
    grid_y = min(-(-rows // (block_y * 16)), 128)
    if grid_y < 8:
        return ()
    return Held(values * channels * grid_y * _accumulator_bytes(x)), Held(4 * -(-channels // block_x))


def _reads_channels_last(x: Tensor) -> bool:
    """`batch_norm_choose_impl`: so are matrices, and images of one pixel."""
    return x.stride(1) == 1 or _is_channels_last(x)


def _power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


RULES: dict[Any, Rule] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}
