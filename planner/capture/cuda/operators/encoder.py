"""Run CUDA's inference fast paths of transformer layers, operator by operator.

The layers are `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`. The functions follow
ATen/native/transformers/cuda/attention.cu, attention.cpp and transformer.cpp. Local variables hold tensors as
long as in that source, so that the trace frees memory when a GPU does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.capture.cuda.operators.sdpa_backend import MATH, SdpaCall, select
from planner.program import TorchVersion

Kernels = dict[str, Callable[..., Any]]


def kernels(capability: tuple[int, int], version: TorchVersion) -> Kernels:
    """Return the kernels of transformer layers' inference fast paths, by operator name."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor,
        qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None,
        need_weights: bool = True, average_attn_weights: bool = True, mask_type: int | None = None,
    ) -> Any:  # fmt: skip
        """Run `_native_multi_head_attention` as on CUDA; return its output, and attention weights or None.

        It is fused if there is no mask and no weights are returned. The fused path also requires that the
        selected attention backend is not the math backend.
        """
        heads = query.view(query.shape[0], -1, num_head, embed_dim // num_head).transpose(1, 2)
        kernel = select(SdpaCall(heads, heads, heads, torch=version), capability)
        if mask is None and not need_weights and kernel != MATH:
            return _fused(query, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias), None
        context, weights = _unfused(query, num_head, qkv_weight, mask)
        weights = weights if need_weights else None
        out = _project(context, proj_weight, proj_bias)
        if weights is not None and average_attn_weights:
            weights = weights.sum(1).div_(num_head)
        return out, weights

    return {
        "_native_multi_head_attention": attend,
        "_transformer_encoder_layer_fwd": _encode,
        "_nested_tensor_from_mask_left_aligned": _is_left_aligned,
    }


def _is_left_aligned(x: Tensor, mask: Tensor) -> bool:
    """Return False, so that nn.TransformerEncoder does not pack its input.

    A packed input is a nested tensor. The true answer depends on the padding mask's values. False never plans
    too little memory, since nothing is packed, as for a batch without padding.
    """
    return False


def _fused(
    query: Tensor, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor
) -> Tensor:
    projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    q, k, v = (t.view(t.shape[0], -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in projected)
    out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(out.transpose(1, 2).reshape(query.shape), proj_weight, proj_bias)


def _unfused(
    query: Tensor, heads: int, qkv_weight: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the context tensor, in the memory of the queries, and the softmax of the scores."""
    batch, rows, width = query.shape
    qkv = torch.matmul(query, qkv_weight.t())
    # _transform_bias_rescale_qkv: one buffer for all three, then the projection is freed
    q, k, _ = torch.empty(3, batch, heads, rows, width // heads, dtype=qkv.dtype, device=qkv.device).unbind()
    del qkv
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(batch, heads, rows, rows)
    if mask is None:
        return q, scores  # masked_softmax: without a mask the softmax is in place
    if mask.dtype is not torch.bool:
        mask = mask.to(torch.bool)
    return q, torch.softmax(scores, -1)


def _project(context: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the output projection to a copy of the context with merged heads.

    This is `transform0213_gemm_nt_bias`.
    """
    batch, heads, rows, width = context.shape
    return F.linear(context.permute(0, 2, 1, 3).reshape(batch, rows, heads * width), weight, bias)


def _encode(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor,
    norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor,
    ffn_weight_2: Tensor, ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    x = norm_1(src) if norm_first else src
    projections = qkv_weight, qkv_bias, proj_weight, proj_bias
    x = torch._native_multi_head_attention(
        x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type
    )[0]
    x.add_(src)
    if not norm_first:
        x = norm_1(x)
    before = x
    if norm_first:
        x = norm_2(x)
    # _addmm_activation: relu or gelu is the epilogue of the product and takes no additional memory
    hidden = torch.addmm(ffn_bias_1, x.view(-1, embed_dim), ffn_weight_1.t())
    out = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view(src.shape)
    del hidden
    x = out.add_(before)
    return x if norm_first else norm_2(x)
