"""Meta kernels for convolutions, with outputs in cuDNN's memory format.

Sources: ATen/native/Convolution.cpp and ConvUtils.h.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import (
    channels_last,
    contiguous,
    empty,
    empty_strided,
    is_floating_meta,
    suggests_channels_last,
)
from planner.program import Capability


def _convolution(
    capability: Capability, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
    groups: int,
) -> Any:  # fmt: skip
    """Return a convolution's output in the memory format of CUDA, or NotImplemented for unusual arguments.

    The format is of cuDNN or of the native kernel. torch's meta kernel always returns a contiguous output.
    """
    spatial = x.dim() - 2
    if spatial < 1 or weight.dim() != x.dim() or 0 in x.shape or not is_floating_meta(x, weight, bias):
        return NotImplemented
    if any(len(sizes) not in (1, spatial) for sizes in (stride, padding, dilation, output_padding)):
        return NotImplemented
    stride, padding, dilation, output_padding = (  # expand_param_if_needed in ATen/native/Convolution.cpp
        sizes if len(sizes) == spatial else [*sizes] * spatial
        for sizes in (stride, padding, dilation, output_padding)
    )
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if x.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        return NotImplemented
    if channels % groups or (bias is not None and tuple(bias.shape) != (channels,)):
        return NotImplemented
    shape = [x.shape[0], channels]
    for i in range(spatial):
        reach = dilation[i] * (weight.shape[2 + i] - 1) + 1
        if transposed:
            shape.append((x.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach + output_padding[i])
        else:
            shape.append((x.shape[2 + i] + 2 * padding[i] - reach) // stride[i] + 1)
    if min(shape) < 1:
        return NotImplemented
    is_resized = transposed and spatial == 3 and groups == 1 and _is_native(capability, x)
    if is_resized and prod(shape) < x.numel():
        # The output has the input's size before it is resized, and keeps that storage:
        # slow_conv_transpose3d_cuda, ATen/native/cuda/NaiveConvolutionTranspose3d.cu.
        return empty(x.shape, x.dtype).resize_(shape)
    return empty_strided(shape, _strides(capability, x, weight, shape), x.dtype)


def _convolution_backward(
    capability: Capability, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None,
    stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Return a convolution's gradients of input, weight and bias, each None if `mask` does not select it.

    The first two have the memory format of the forward pass. Returns NotImplemented for unusual arguments.
    """
    if weight.dim() != x.dim() or 0 in x.shape or 0 in weight.shape or not is_floating_meta(grad, x, weight):
        return NotImplemented
    if mask[2] and bias_sizes is None:
        return NotImplemented
    gradients = [
        empty_strided(t.shape, _strides(capability, x, weight, t.shape), x.dtype) if is_needed else None
        for t, is_needed in zip((x, weight), mask, strict=False)
    ]
    return (
        *gradients,
        empty(bias_sizes, x.dtype) if mask[2] and bias_sizes is not None else None,
    )


def _strides(capability: Capability, x: Tensor, weight: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides for `shape`: channels last if the input or the weight is channels last, or contiguous.

    This is `cudnn_conv_suggest_memory_format`. Strides are always contiguous in double precision, and in
    bfloat16 below compute capability 8.0, for which cuDNN is not used.
    """
    if x.dtype is torch.float64 or not (suggests_channels_last(x) or suggests_channels_last(weight)):
        return contiguous(shape)
    return contiguous(shape) if _is_native(capability, x) else channels_last(shape)


def _is_native(capability: Capability, x: Tensor) -> bool:
    """Return whether torch's native kernel runs, not cuDNN: for bfloat16 below compute capability 8.0."""
    return x.dtype is torch.bfloat16 and capability < (8, 0)


def kernels(capability: Capability) -> Mapping[str, Callable[..., Any]]:
    """Return the meta kernels of convolutions, by operator name, for GPUs of a compute capability."""
    return {
        "convolution": partial(_convolution, capability),
        "convolution_backward": partial(_convolution_backward, capability),
    }
