"""Scratch memory of the attention kernels (ATen/native/transformers/cuda/attention.cu and
attention_backward.cu).
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _efficient_backward(args: tuple[Any, ...], out: Any, capability: tuple[int, int]) -> tuple[int, ...]:
    """Delta, the row sums of grad_out * out.

    Half-precision kernels compute it inside, into B x H x M floats. The float kernels do not (cutlass
    kernel_backward.h, kKernelComputesDelta): the product is made first, a tensor like `out`, then summed.
    """
    grad_out, query = args[0], args[1]
    batch, heads, rows, _ = query.shape
    delta = 4 * batch * heads * rows
    if grad_out.dtype is torch.float32:
        return (4 * prod(grad_out.shape), 2 * delta)
    return (delta,)


def _safe_softmax(args: tuple[Any, ...], out: Tensor, capability: tuple[int, int]) -> tuple[int, ...]:
    """The plain softmax and a mask of the entries at minus infinity, before rows without any finite
    entry are zeroed.
    """
    elements = out.numel()
    return (elements * out.element_size() + elements,)


def _native_multi_head_attention(
    args: tuple[Any, ...], out: Any, capability: tuple[int, int]
) -> tuple[int, ...]:
    """Outside the fused path (cuda/attention.py): the projection beside q, k, v with their bias, each three
    times as wide as the input; then q, k, v beside the scores and their softmax.
    """
    query, heads = args[0], args[4]
    batch, rows, width = query.shape
    projected = 3 * batch * rows * width * query.element_size()
    scores = batch * heads * rows * rows * query.element_size()
    return (projected + max(projected, 2 * scores),)


RULES: dict[Any, Callable[[tuple[Any, ...], Any, tuple[int, int]], tuple[int, ...]]] = {
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten._native_multi_head_attention.default: _native_multi_head_attention,
}

# The generator's seed and offset stay on the CPU outside graph capture.
CPU_OUTPUTS: dict[Any, tuple[int, ...]] = {
    aten._scaled_dot_product_efficient_attention.default: (2, 3),
}
