"""Scratch memory of the attention kernels (ATen/native/transformers/cuda/attention.cu and
attention_backward.cu, cuda/flash_attn/flash_api.cpp, native/cudnn/MHA.cpp).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.nn import mem_efficient_attention as efficient_attention
from planner.capture.workspaces.steps import Held, Made, Rule, Step, tensor_bytes
from planner.program import Target

aten = torch.ops.aten


def _safe_softmax(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """The plain softmax, a mask of the entries at minus infinity and which rows have nothing else, before
    rows without any finite entry are zeroed in the output (ATen/native/transformers/attention.cpp).
    """
    dim = args[1] % out.dim()
    rows = out.numel() // out.shape[dim]
    return (Held(tensor_bytes(out)), Held(out.numel()), Held(rows), Held(out.element_size()), Made.REST)


def _flash(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Nothing beside the outputs, if the call fills the GPU.

    A call with fewer than 1.6 blocks of 64 rows a multiprocessor is split over the keys, into partial
    outputs in float32 (`set_params_splitkv`): some MiB in generation and at the smallest batches. They are
    left out, since the number of multiprocessors is not known here.
    """
    return ()


def _flash_backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Sums of rows and the queries' gradient in float32, rows in steps of 128 and heads in steps of 32, or
    64 above 128; and for grouped queries the gradients of keys and values for every head of the query.

    Under deterministic algorithms the accumulator is as many times larger as the GPU has multiprocessors
    for each head of the batch; one is assumed, which is what a large batch has.
    """
    grad, query, key, _, result = args[:5]
    batch, heads, rows, width = query.shape
    rows_up = -(-rows // 128) * 128
    step = 32 if width <= 128 else 64
    sums = 4 * batch * heads * rows_up
    accumulator = sums * -(-width // step) * step
    expanded = heads * batch * key.shape[-2] * width * key.element_size() if key.shape[1] != heads else 0
    return (
        *_copies_in_rows(grad, result),
        Made.REST, Held(sums), Held(accumulator), Held(expanded), Held(expanded),
    )  # fmt: skip


def _copies_in_rows(*tensors: Tensor) -> tuple[Step, ...]:
    """Copies of those that are not contiguous as (batch, rows, heads, width)."""
    return tuple(Held(tensor_bytes(t)) for t in tensors if not t.transpose(1, 2).is_contiguous())


def _cudnn(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Nothing is known of a workspace: what cuDNN's engine asks for is its own (cudnn-frontend asks for
    none).
    """
    return ()


def _cudnn_backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """One workspace: sums of rows and the queries' gradient in float32, and for grouped queries the
    gradients of keys and values for every head of the query.

    cudnn-frontend, scaled_dot_product_flash_attention.h (SDPA backward). What the engine adds is not known.
    A gradient whose last dimension is strided is copied first.
    """
    grad, query, key, value = args[:4]
    batch, heads, rows, width = query.shape
    workspace = 4 * batch * heads * rows * (1 + width)
    if key.shape[1] != heads:
        workspace += batch * heads * key.shape[2] * (width + value.shape[-1]) * key.element_size()
    copy = 0 if grad.stride(-1) == 1 else tensor_bytes(grad)
    return (Made.REST, Held(copy), workspace)


RULES: Mapping[Any, Rule] = {
    aten._safe_softmax.default: _safe_softmax,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_attention.forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention.backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}

# The generator's seed and offset stay on the CPU outside graph capture.
CPU_OUTPUTS: Mapping[Any, tuple[int, ...]] = {
    aten._scaled_dot_product_efficient_attention.default: (2, 3),
}
