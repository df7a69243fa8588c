"""Workspace rules of softmax and attention kernels.

Sources: ATen/native/transformers/cuda/attention.cu and attention_backward.cu, cuda/flash_attn/flash_api.cpp,
native/cudnn/MHA.cpp; ATen/native/cuda/SoftMax.cu.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import contiguous, pointwise_strides
from planner.capture.workspaces._rule import argument, ceil_div, contiguous_copies, released, tensor_bytes
from planner.capture.workspaces.nn import mem_efficient_attention as efficient_attention
from planner.capture.workspaces.ops import Args, Hold, Ops, Output, Outputs, Release, Rule
from planner.program import Target, TorchVersion

_STATE = 6  # position of the generator's state among the outputs of flash attention
_SEED_ON_GPU_SINCE: TorchVersion = (2, 7)  # pytorch/pytorch#146372


def _softmax_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of softmax's backward pass: the product of gradient and output, and copies.

    Contiguous copies of product and output are held if these are not contiguous. Source: SoftMax.cu,
    softmax_backward_cuda_out.
    """
    grad, output = args[0], args[1]
    product = Hold(max(tensor_bytes(grad), tensor_bytes(output)))
    copy = () if _is_product_contiguous(grad, output) else (product,)
    return (Outputs(), product, *copy, *contiguous_copies(output))


def _is_product_contiguous(grad: Tensor, output: Tensor) -> bool:
    if grad.is_contiguous() and output.is_contiguous():
        return True
    shape = tuple(output.shape)
    return pointwise_strides(shape, [tuple(grad.stride()), tuple(output.stride())]) == contiguous(shape)


def _safe_softmax(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `_safe_softmax`: a copy if needed, and masks of entries and rows at minus infinity.

    The second mask is of rows that have only such entries. These rows are zeroed in place, except for meta
    tensors (ATen/native/transformers/attention.cpp). An input of another type than the result is converted
    first, unless it is float16.
    """
    x, dim = args[0], args[1] % out.dim()
    rows = out.numel() // out.shape[dim]
    masks = (Hold(out.numel()), Hold(rows), Hold(out.element_size()))
    if x.dtype is not out.dtype and x.dtype is not torch.float16:
        return (Hold(tensor_bytes(out)), Outputs(), Release(1), *masks)
    copy = contiguous_copies(x)
    return (Outputs(), *copy, *released(copy), *masks)


def _flash(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of flash attention's forward pass, or () without dropout or before torch 2.7.

    With dropout, the generator's state is allocated twice, and the first block is freed then (`mha_fwd`).
    Partial outputs in float32 are left out. They take some MiB in generation and at the smallest batches: a
    call with fewer than 1.6 blocks of 64 rows per multiprocessor is split over the keys
    (`set_params_splitkv`).
    """
    if not argument(args, 3, 0.0) or target.torch < _SEED_ON_GPU_SINCE:
        return ()
    state = out[_STATE]
    return (Output(), Output(), Hold(tensor_bytes(state)), Output(1), Output(), Release(1))


def _cudnn(args: Args, out: Any, target: Target) -> Ops:
    """Return no ops for the forward pass of cuDNN's attention.

    The kernel is assumed to allocate only its outputs: a workspace of cuDNN's engines is unknown, and
    cudnn-frontend requests none.
    """
    return ()


def _flash_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return flash attention's backward ops: copies, outputs, row sums, and buffers for gradients.

    Row sums and the buffer for the queries' gradient are in float32; for grouped queries the ops also hold
    the gradients of keys and values for every head of the query. Rows are rounded up to 128, the width of
    heads to 32, or to 64 above 128.

    With deterministic algorithms the buffer for the queries' gradient is multiplied by the number of
    multiprocessors per head of the batch; 1 is assumed, which holds for a large batch.
    """
    grad, query, key, _, result = args[:5]
    batch, heads, rows, width = query.shape
    rows_up = ceil_div(rows, 128) * 128
    step = 32 if width <= 128 else 64
    sums = 4 * batch * heads * rows_up
    accumulator = sums * ceil_div(width, step) * step
    expanded = heads * batch * key.shape[-2] * width * key.element_size() if key.shape[1] != heads else 0
    copies = contiguous_copies(grad.transpose(1, 2), result.transpose(1, 2))  # batch, rows, heads, width
    return (*copies, Outputs(), Hold(sums), Hold(accumulator), Hold(expanded), Hold(expanded))


def _cudnn_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of the backward pass of cuDNN's attention: outputs, a copy and a workspace.

    The workspace has row sums and the queries' gradient in float32, and for grouped queries the gradients of
    keys and values for every head of the query. Source: cudnn-frontend, scaled_dot_product_flash_attention.h
    (SDPA backward). The engine's own part is unknown. A gradient whose last dimension is strided is copied
    first.
    """
    grad, query, key, value = args[:4]
    batch, heads, rows, width = query.shape
    workspace = 4 * batch * heads * rows * (1 + width)
    if key.shape[1] != heads:
        workspace += batch * heads * key.shape[2] * (width + value.shape[-1]) * key.element_size()
    copy = 0 if grad.stride(-1) == 1 else tensor_bytes(grad)
    return (Outputs(), Hold(copy), workspace)


RULES: Mapping[str, Rule] = {
    "_softmax_backward_data": _softmax_backward,
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_attention.forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention.backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}

# Positions of the generator's seed and offset, which are on the CPU outside of graph capture, and the first
# version of torch that has them on the GPU.
CPU_OUTPUTS: Mapping[str, tuple[tuple[int, ...], TorchVersion | None]] = {
    "_scaled_dot_product_efficient_attention": ((2, 3), None),
    "_scaled_dot_product_flash_attention": ((_STATE, _STATE + 1), _SEED_ON_GPU_SINCE),
}
