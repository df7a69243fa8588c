"""Select the backend that CUDA's `scaled_dot_product_attention` runs.

The selector follows ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h of torch 2.13. The header
was read as installed; the source was read in a slightly older and a slightly newer version, and a comment
notes each difference between the two. Nested tensors are not covered.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from planner.program import NEWEST_TORCH, Capability, TorchVersion

_HALVES = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)  # the last architecture that the fused kernels of 2.13 accept


MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
EFFICIENT, CUDNN = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
_DEFAULT_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)  # ATen/Context.h
_CUDNN_SINCE: TorchVersion = (2, 11)


@dataclass(frozen=True, slots=True)
class SdpaCall:
    """A call of `scaled_dot_product_attention`, with the torch version that runs it.

    Tensors are (batch, heads, rows, width).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    torch: TorchVersion = NEWEST_TORCH

    @property
    def needs_grad(self) -> bool:
        """Return whether autograd records the call for a backward pass."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def select(call: SdpaCall, capability: Capability) -> SDPBackend:
    """Return the attention backend that a GPU of this compute capability runs for a call.

    Settings by torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp are respected. Raises
    RuntimeError if every backend that would accept the call is disabled.
    """
    accepts = {FLASH: _flash_accepts, EFFICIENT: _efficient_accepts, CUDNN: _cudnn_accepts}
    enabled = _cur_sdpa_kernel_backends()
    for backend in _order(capability, call.torch):
        if backend in enabled and (backend == MATH or accepts[backend](call, capability)):
            return backend
    raise RuntimeError(
        "no available kernel for scaled_dot_product_attention: all that would fit are disabled"
    )


def _order(capability: Capability, version: TorchVersion) -> tuple[SDPBackend, ...]:
    """Return the attention backends by priority, highest first; since torch 2.11 some GPUs prefer cuDNN.

    cuDNN is first on compute capabilities 9.0, 10.0 and 10.3. On other GPUs and before torch 2.11 cuDNN is
    last. An order that the process has changed is kept. torch 2.5.0 preferred cuDNN on 9.0, 2.5.1 reverted
    that (pytorch/pytorch#138522), and 2.9 preferred it again. Since 2.9.1 the preference requires a cuDNN
    newer than 9.15.0, which the default wheels have since 2.11; the last patch release's default wheels are
    assumed here. TORCH_CUDNN_SDPA_DEPRIORITIZED is not read.
    """
    backends = map(SDPBackend, torch._C._get_sdp_priority_order())
    order = tuple(backend for backend in backends if backend in _DEFAULT_ORDER)
    is_preferred = version >= _CUDNN_SINCE and capability in ((9, 0), (10, 0), (10, 3))
    if order == _DEFAULT_ORDER and is_preferred:
        return (CUDNN, FLASH, EFFICIENT, MATH)
    return order


# ---- the backends one by one


def _flash_accepts(call: SdpaCall, capability: Capability) -> bool:
    query, key, value = call.query, call.key, call.value
    if not _is_rank_4(call) or call.mask is not None:
        return False
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256:
        return False
    if not (8, 0) <= capability <= _NEWEST or not _has_dtype(call, _HALVES):
        return False
    if call.is_causal and query.shape[-2] != key.shape[-2]:
        return False
    return (
        _flash_can_go_back(call, capability)
        and _heads_match(call, grouped=True)
        and _has_rows(call)
        and (_is_unit_stride(call) or query.shape[-1] == 1)
    )


def _flash_can_go_back(call: SdpaCall, capability: Capability) -> bool:
    """Return whether flash attention can run the call's backward pass, or the call needs none.

    GPUs with 99 KiB of shared memory have no backward pass for some wide heads.
    """
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if not small or not call.needs_grad:
        return True
    width = call.query.shape[-1]
    return width <= 192 or (width > 224 and call.dropout_p == 0)


def _efficient_accepts(call: SdpaCall, capability: Capability) -> bool:
    dtypes = (torch.float16, torch.float32) if capability < (8, 0) else (*_HALVES, torch.float32)
    query, key, value = call.query, call.key, call.value
    if not _is_rank_4(call) or not _has_dtype(call, dtypes) or not (5, 0) <= capability <= _NEWEST:
        return False
    alignment = gemm_alignment(query.dtype, capability)
    widths = (query.shape[-1], value.shape[-1])
    if query.shape[-1] != key.shape[-1] or any(width < 1 or width % alignment for width in widths):
        return False
    # Grouped queries are refused in 2.13, accepted by later versions.
    return _has_rows(call) and _is_unit_stride(call) and _heads_match(call, grouped=False)


def _cudnn_accepts(call: SdpaCall, capability: Capability) -> bool:
    query, key, value = call.query, call.key, call.value
    if not _is_rank_4(call) or not (8, 0) <= capability <= _NEWEST or not _has_dtype(call, _HALVES):
        return False
    strict = torch.are_deterministic_algorithms_enabled()
    if strict and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not _mask_broadcasts(call) or not _has_rows(call) or not _heads_match(call, grouped=True):
        return False
    widths = (query.shape[-1], value.shape[-1])
    if any(width % 8 or width > _cudnn_width(widths, capability) for width in widths):
        return False
    if key.shape[-2] == 1 or (query.shape[-2] == 1 and call.dropout_p != 0):
        return False
    return _is_unit_stride(call) or query.shape[-1] == 1


def _cudnn_width(widths: tuple[int, int], capability: Capability) -> int:
    """Return the largest head width that cuDNN accepts.

    `widths` are the widths of queries and values. Versions after 2.13 need a newer cuDNN for 256 on 9.0, and
    accept 256 on 10.x too.
    """
    if capability == (9, 0):
        return 256
    return 192 if capability[0] == 10 and widths == (192, 128) else 128


def gemm_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Return the alignment of a head's width that efficient attention requires, in elements.

    Source: `minimum_gemm_alignment`. The alignment is 16 bytes if tensor cores compute the product, otherwise
    1 element.
    """
    half = dtype in _HALVES
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        return 8 if half else 4
    return 1


# ---- conditions that backends share


def _is_rank_4(call: SdpaCall) -> bool:
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _has_dtype(call: SdpaCall, dtypes: tuple[torch.dtype, ...]) -> bool:
    query = call.query.dtype
    return query in dtypes and query == call.key.dtype == call.value.dtype


def _has_rows(call: SdpaCall) -> bool:
    return call.query.shape[-2] > 0 and call.key.shape[-2] > 0


def _is_unit_stride(call: SdpaCall) -> bool:
    tensors = (call.query, call.key, call.value, call.mask)
    return all(t.stride(-1) == 1 for t in tensors if t is not None)


def _heads_match(call: SdpaCall, *, grouped: bool) -> bool:
    """Return whether batch sizes are equal, and numbers of heads equal, or divisible if queries are grouped.

    Without grouped queries, the numbers of heads must be equal. If the call enables grouped queries and the
    backend takes them (`grouped`), the number of heads of keys and values must divide the number of the
    query's heads.
    """
    query, key, value = call.query, call.key, call.value
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads = [t.shape[-3] for t in (query, key, value)]
    if call.enable_gqa and grouped:
        return heads[1] == heads[2] and heads[0] % heads[1] == 0
    return heads[0] == heads[1] == heads[2]


def _mask_broadcasts(call: SdpaCall) -> bool:
    """Return whether the call has no mask, or a mask without gradient and with a shape that cuDNN accepts.

    Source: `check_attn_mask_shape`. cuDNN accepts a call without a mask, or with a mask of 2 or 4 dimensions
    that requires no gradient and broadcasts to the scores.
    """
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (*call.query.shape[:3], call.key.shape[2])
    return all(size in (1, want) for size, want in zip(mask.shape, full[-mask.dim() :], strict=True))
