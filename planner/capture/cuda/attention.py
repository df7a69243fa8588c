"""`scaled_dot_product_attention` as on CUDA: what the chosen kernel is handed.

The dispatch is ATen/native/transformers/attention.cpp (torch 2.13; its operators are those that the installed
library runs on the CPU). What the kernels keep for the backward pass is what their operators return:
flash and cuDNN their sums of rows, B x H x rows floats; the efficient one in steps of 32 rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.capture.cuda.sdpa_backend import Kernel, Request, choose

aten = torch.ops.aten


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel, for a GPU of this compute capability."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        request = Request(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        match choose(request, capability):
            case Kernel.FLASH:
                return _flash(request, scale)
            case Kernel.EFFICIENT:
                return _efficient(request, scale)
            case Kernel.CUDNN:
                mask = _additive(attn_mask, query.dtype)
                return aten._scaled_dot_product_cudnn_attention(
                    query, key, value, mask, request.needs_grad, dropout_p, is_causal, False, scale=scale
                )[0]
            case Kernel.MATH:
                return _math(request, scale)

    return {"scaled_dot_product_attention": attend}


def _flash(request: Request, scale: float | None) -> Tensor:
    """Heads are padded to a multiple of 8 outside the kernel, in copies that it then saves."""
    width = request.query.shape[-1]
    padded = [
        F.pad(t, [0, -width % 8]) if width % 8 else t for t in (request.query, request.key, request.value)
    ]
    scale = width**-0.5 if scale is None else scale
    out: Tensor = aten._scaled_dot_product_flash_attention(
        *padded, request.dropout_p, request.is_causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _efficient(request: Request, scale: float | None) -> Any:
    mask = _additive(request.mask, request.query.dtype)
    if mask is not None:
        mask = _aligned(mask).expand(*request.query.shape[:3], request.key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        request.query, request.key, request.value, mask, request.needs_grad, request.dropout_p,
        request.is_causal, scale=scale,
    )[0]  # fmt: skip


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of booleans as one of numbers to add (`convert_boolean_attn_mask`), of the mask's own shape."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    nothing = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask, nothing, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> Tensor:
    """`preprocess_mask`: rows of the mask must start at multiples of 8 elements, or it is padded in a copy.

    The copy has the mask's own shape: since torch 2.5 it is made before the mask is expanded to batch and
    heads; torch 2.0 to 2.4 expanded first and padded to 16.
    """
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return F.pad(mask, [0, 8 - columns % 8])[..., :columns]


def _math(request: Request, scale: float | None) -> Tensor:
    """`_scaled_dot_product_attention_math`, with the in-place addition of the mask that CUDA tensors get.

    Halves are computed in float32, unless torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp is on (since
    torch 2.5), and the scores are rounded to halves as a second result, which nobody reads.
    """
    query, key, value = request.query, request.key, request.value
    dtype = query.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    if half and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query, key, value = query.float(), key.float(), value.float()
    root = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scaled = query * root
    mask = request.mask
    if request.is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    # A causal mask is made in the dtype of the scores, one that was given in that of the inputs.
    mask = _additive(mask, scaled.dtype if request.is_causal else dtype)
    keys, values = _ungrouped(request, key), _ungrouped(request, value)
    scores = torch.matmul(scaled, keys.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax(scores, -1)
    if request.dropout_p > 0:
        scores = torch.dropout(scores, request.dropout_p, True)
    _rounded = scores.to(dtype)  # alive until the result is there
    return torch.matmul(scores, values).to(dtype)


def _ungrouped(request: Request, tensor: Tensor) -> Tensor:
    """Keys or values repeated for every head of the query that shares them."""
    groups = request.query.shape[-3] // tensor.shape[-3] if request.enable_gqa else 1
    return tensor.repeat_interleave(groups, -3) if groups > 1 else tensor
