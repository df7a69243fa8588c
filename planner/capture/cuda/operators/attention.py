"""Run `scaled_dot_product_attention` on meta tensors as CUDA does.

The kernels run the operators of the backend that CUDA selects. The dispatch follows
ATen/native/transformers/attention.cpp (torch 2.13, whose operators the installed library runs on the CPU).
The kernels keep outputs of their operators for the backward pass: flash and cuDNN keep the sums of rows, B x
H x rows floats; the efficient backend rounds the rows up to multiples of 32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.capture.cuda.operators.sdpa_backend import CUDNN, EFFICIENT, FLASH, SdpaCall, select
from planner.program import TorchVersion

aten = torch.ops.aten
_SAFE_SINCE: TorchVersion = (2, 5)


def kernels(capability: tuple[int, int], version: TorchVersion) -> dict[str, Callable[..., Any]]:
    """Return {"scaled_dot_product_attention": kernel}; the kernel runs the backend that CUDA selects."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        call = SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, version)
        backend = select(call, capability)
        run = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn}.get(backend, _math)
        return run(call, scale)

    return {"scaled_dot_product_attention": attend}


def _flash(call: SdpaCall, scale: float | None) -> Tensor:
    """Run flash attention with head widths padded to a multiple of 8, and return the output unpadded.

    The kernel saves the padded copies for the backward pass.
    """
    width = call.query.shape[-1]
    padded = [F.pad(t, [0, -width % 8]) if width % 8 else t for t in (call.query, call.key, call.value)]
    scale = width**-0.5 if scale is None else scale
    out: Tensor = aten._scaled_dot_product_flash_attention(
        *padded, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _efficient(call: SdpaCall, scale: float | None) -> Any:
    mask = _additive(call, call.mask, call.query.dtype)
    if mask is not None:
        mask = _aligned(mask).expand(*call.query.shape[:3], call.key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, mask, call.needs_grad, call.dropout_p,
        call.is_causal, scale=scale,
    )[0]  # fmt: skip


def _cudnn(call: SdpaCall, scale: float | None) -> Any:
    return aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, _additive(call, call.mask, call.query.dtype), call.needs_grad,
        call.dropout_p, call.is_causal, False, scale=scale,
    )[0]  # fmt: skip


def _additive(call: SdpaCall, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as numbers to add to the scores (0 or -inf), or any other mask unchanged.

    This is `convert_boolean_attn_mask`. The result has the mask's shape. Before torch 2.5 the result is made
    of zeros, which are filled in place with -inf at positions that the mask leaves out.
    """
    if mask is None or mask.dtype is not torch.bool:
        return mask
    if call.torch < _SAFE_SINCE:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
    nothing = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask, nothing, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> Tensor:
    """Return the mask if its rows are dense and start at multiples of 8 elements, else a padded copy.

    This is `preprocess_mask`. The copy has the mask's shape, since it is made before the mask is expanded to
    batch and heads.
    """
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return F.pad(mask, [0, 8 - columns % 8])[..., :columns]


def _math(call: SdpaCall, scale: float | None) -> Tensor:
    """Run `_scaled_dot_product_attention_math` as for CUDA tensors.

    The mask is added in place. float16 and bfloat16 are computed in float32, unless
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp is on. The scores are also rounded to the inputs'
    dtype as a second result, which is not read. Before torch 2.5 nothing is computed in float32, and the
    softmax is the plain operator.
    """
    query, key, value = call.query, call.key, call.value
    dtype = query.dtype
    mask = _additive(call, call.mask, dtype)
    half = dtype in (torch.float16, torch.bfloat16) and call.torch >= _SAFE_SINCE
    if half and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query, key, value = query.float(), key.float(), value.float()
    root = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scaled = query * root
    if call.is_causal:  # made in the scores' dtype, whereas a given mask was converted to the inputs' dtype
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(call, mask, scaled.dtype)
    keys, values = _ungrouped(call, key), _ungrouped(call, value)
    scores = torch.matmul(scaled, keys.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax(scores, -1) if call.torch >= _SAFE_SINCE else torch.softmax(scores, -1)
    if call.dropout_p > 0:
        scores = torch.dropout(scores, call.dropout_p, True)
    _rounded = scores.to(dtype)  # alive until the function returns
    return torch.matmul(scores, values).to(dtype)


def _ungrouped(call: SdpaCall, tensor: Tensor) -> Tensor:
    """Return keys or values, repeated for the query heads that share them if the call groups queries."""
    groups = call.query.shape[-3] // tensor.shape[-3] if call.enable_gqa else 1
    return tensor.repeat_interleave(groups, -3) if groups > 1 else tensor
