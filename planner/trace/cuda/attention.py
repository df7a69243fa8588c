"""`scaled_dot_product_attention` as on CUDA: which kernel runs, and what it is handed.

The selector is ATen/native/transformers/cuda/sdp_utils.cpp, the dispatch
ATen/native/transformers/attention.cpp.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


def _flash_applies(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    capability: tuple[int, int],
) -> bool:
    width = query.shape[-1]
    return (
        capability >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and mask is None
        and query.dim() == 4
        and width == key.shape[-1] == value.shape[-1] <= 256
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and all(t.stride(-1) == 1 for t in (query, key, value))
    )


def _efficient_applies(query: Tensor, key: Tensor, value: Tensor, capability: tuple[int, int]) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dtype is torch.bfloat16 and capability < (8, 0):
        return False
    if query.dim() != 4 or not (half or query.dtype is torch.float32):
        return False
    tensor_cores = capability >= (8, 0) or (half and capability >= (7, 0))
    alignment = (8 if half else 4) if tensor_cores else 1
    return (
        query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
        and query.shape[1] == key.shape[1] == value.shape[1]
        and all(t.stride(-1) == 1 for t in (query, key, value))
    )


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the memory-efficient kernel wants it: expanded, then its last dimension padded to 16.

    Padding an expanded mask writes it out in full: batch x heads x rows x columns.
    """
    mask = mask.expand(*query.shape[:3], key.shape[2])
    columns = mask.shape[-1]
    return F.pad(mask, [0, -columns % 16])[..., :columns] if columns % 16 else mask


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """The composite path, with the in-place addition of the mask that CUDA tensors get."""
    root = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    query = query * root
    if is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        scores = torch.dropout(scores, dropout_p, True)
    return torch.matmul(scores, value)


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel, for a GPU of this compute capability."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        if _flash_applies(query, key, value, attn_mask, is_causal, capability):
            width = query.shape[-1]
            padded = [F.pad(t, [0, -width % 8]) if width % 8 else t for t in (query, key, value)]
            scale = width**-0.5 if scale is None else scale
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[
                0
            ]
            return out[..., :width] if width % 8 else out
        if _efficient_applies(query, key, value, capability):
            if mask is not None:
                mask = _aligned_mask(mask, query, key)
            grad = query.requires_grad or key.requires_grad or value.requires_grad
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, grad, dropout_p, is_causal, scale=scale
            )[0]
        return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)

    def attend_multi_head(
        query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor,
        qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None,
        need_weights: bool = True, average_attn_weights: bool = True, mask_type: int | None = None,
    ) -> Any:  # fmt: skip
        """The fast path of nn.MultiheadAttention in inference (native/transformers/cuda/attention.cu)."""
        width = embed_dim // num_head
        heads = query.view(query.shape[0], -1, num_head, width).transpose(1, 2)
        fused = _flash_applies(heads, heads, heads, mask, False, capability) or _efficient_applies(
            heads, heads, heads, capability
        )
        if query is key is value and width % 8 == 0 and not need_weights and mask is None and fused:
            projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
            q, k, v = (t.view(t.shape[0], -1, num_head, width).transpose(1, 2) for t in projected)
            out = F.scaled_dot_product_attention(q, k, v)
            return F.linear(out.transpose(1, 2).reshape(query.shape), proj_weight, proj_bias), None
        with torch._C._AutoDispatchBelowAutograd():
            return aten._native_multi_head_attention(
                query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
                mask, need_weights, average_attn_weights, mask_type,
            )  # fmt: skip

    return {"scaled_dot_product_attention": attend, "_native_multi_head_attention": attend_multi_head}
