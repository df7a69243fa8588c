"""Which kernel CUDA's `scaled_dot_product_attention` runs.

The selector is ATen/native/transformers/cuda/sdp_utils.cpp with sdp_utils_cpp.h, as in torch 2.13: the
header is the installed one; the source was read in a version a little older and one a little newer, and a
comment says where they differ. Nested tensors are not covered.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

Capability = tuple[int, int]

_HALVES = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)  # the last architecture that the fused kernels of 2.13 accept


class Kernel(StrEnum):
    """The four implementations of scaled_dot_product_attention on CUDA."""

    MATH = "math"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"


# at::SDPBackend (ATen/SDPBackend.h), as torch._C numbers them; 4 is for out-of-tree devices.
_NUMBERS = {0: Kernel.MATH, 1: Kernel.FLASH, 2: Kernel.EFFICIENT, 3: Kernel.CUDNN}
_DEFAULT_ORDER = (Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH, Kernel.CUDNN)  # ATen/Context.h


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of one call that bear on the choice. Tensors are (batch, heads, rows, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose(request: Request, capability: Capability) -> Kernel:
    """The kernel that a GPU of this compute capability runs.

    Honours what the process has set by torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp.
    Raises RuntimeError where every kernel that would take the call is switched off.
    """
    takes = {
        Kernel.FLASH: _flash_takes,
        Kernel.EFFICIENT: _efficient_takes,
        Kernel.CUDNN: _cudnn_takes,
        Kernel.MATH: lambda *_: True,
    }
    for kernel in _order(capability):
        if _is_enabled(kernel) and takes[kernel](request, capability):
            return kernel
    raise RuntimeError(
        "no available kernel for scaled_dot_product_attention: all that would fit are disabled"
    )


def _order(capability: Capability) -> tuple[Kernel, ...]:
    """cuDNN comes first on compute capability 9.0 and 10.x, else last, which is after math and never.

    By version: torch 2.5.0 preferred it on 9.0, 2.5.1 took that back, 2.9 preferred it again; since 2.10
    it takes cuDNN newer than 9.15.0, which the wheels for CUDA 13 have and those for CUDA 12 have not. The
    default wheel of 2.13 is taken here. TORCH_CUDNN_SDPA_DEPRIORITIZED is not read.
    """
    order = tuple(_NUMBERS[n] for n in torch._C._get_sdp_priority_order() if n in _NUMBERS)
    if order == _DEFAULT_ORDER and capability in ((9, 0), (10, 0), (10, 3)):
        return (Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH)
    return order


def _is_enabled(kernel: Kernel) -> bool:
    queries = {
        Kernel.FLASH: torch._C._get_flash_sdp_enabled,
        Kernel.EFFICIENT: torch._C._get_mem_efficient_sdp_enabled,
        Kernel.CUDNN: torch._C._get_cudnn_sdp_enabled,
        Kernel.MATH: torch._C._get_math_sdp_enabled,
    }
    return queries[kernel]()


# ---- the kernels one by one


def _flash_takes(request: Request, capability: Capability) -> bool:
    query, key, value = request.query, request.key, request.value
    if not _is_rank_4(request) or request.mask is not None:
        return False
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256:
        return False
    if not (8, 0) <= capability <= _NEWEST or not _has_dtype(request, _HALVES):
        return False
    if request.is_causal and query.shape[-2] != key.shape[-2]:
        return False
    return (
        _flash_can_go_back(request, capability)
        and _heads_match(request, grouped=True)
        and _has_rows(request)
        and (_is_unit_stride(request) or query.shape[-1] == 1)
    )


def _flash_can_go_back(request: Request, capability: Capability) -> bool:
    """GPUs with 99 KiB of shared memory lack the backward pass of some wide heads."""
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if not small or not request.needs_grad:
        return True
    width = request.query.shape[-1]
    return width <= 192 or (width > 224 and request.dropout_p == 0)


def _efficient_takes(request: Request, capability: Capability) -> bool:
    dtypes = (torch.float16, torch.float32) if capability < (8, 0) else (*_HALVES, torch.float32)
    query, key, value = request.query, request.key, request.value
    if not _is_rank_4(request) or not _has_dtype(request, dtypes) or not (5, 0) <= capability <= _NEWEST:
        return False
    alignment = gemm_alignment(query.dtype, capability)
    widths = (query.shape[-1], value.shape[-1])
    if query.shape[-1] != key.shape[-1] or any(width < 1 or width % alignment for width in widths):
        return False
    # Grouped queries are not taken in 2.13; versions after it do.
    return _has_rows(request) and _is_unit_stride(request) and _heads_match(request, grouped=False)


def _cudnn_takes(request: Request, capability: Capability) -> bool:
    query, key, value = request.query, request.key, request.value
    if not _is_rank_4(request) or not (8, 0) <= capability <= _NEWEST or not _has_dtype(request, _HALVES):
        return False
    strict = torch.are_deterministic_algorithms_enabled()
    if strict and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not _mask_broadcasts(request) or not _has_rows(request) or not _heads_match(request, grouped=True):
        return False
    widths = (query.shape[-1], value.shape[-1])
    if any(width % 8 or width > _cudnn_width(widths, capability) for width in widths):
        return False
    if key.shape[-2] == 1 or (query.shape[-2] == 1 and request.dropout_p != 0):
        return False
    return _is_unit_stride(request) or query.shape[-1] == 1


def _cudnn_width(widths: tuple[int, int], capability: Capability) -> int:
    """The widest head. Versions after 2.13 ask for a newer cuDNN on 9.0 and take 256 on 10.x too."""
    if capability == (9, 0):
        return 256
    return 192 if capability[0] == 10 and widths == (192, 128) else 128


def gemm_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """What a head's width must be a multiple of (`minimum_gemm_alignment`): 16 bytes for tensor cores."""
    half = dtype in _HALVES
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        return 8 if half else 4
    return 1


# ---- what they share


def _is_rank_4(request: Request) -> bool:
    return request.query.dim() == request.key.dim() == request.value.dim() == 4


def _has_dtype(request: Request, dtypes: tuple[torch.dtype, ...]) -> bool:
    query = request.query.dtype
    return query in dtypes and query == request.key.dtype == request.value.dtype


def _has_rows(request: Request) -> bool:
    return request.query.shape[-2] > 0 and request.key.shape[-2] > 0


def _is_unit_stride(request: Request) -> bool:
    tensors = (request.query, request.key, request.value, request.mask)
    return all(t.stride(-1) == 1 for t in tensors if t is not None)


def _heads_match(request: Request, *, grouped: bool) -> bool:
    """Equal batches and heads; where `grouped` is allowed and asked for, heads that divide the query's."""
    query, key, value = request.query, request.key, request.value
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads = [t.shape[-3] for t in (query, key, value)]
    if request.enable_gqa and grouped:
        return heads[1] == heads[2] and heads[0] % heads[1] == 0
    return heads[0] == heads[1] == heads[2]


def _mask_broadcasts(request: Request) -> bool:
    """`check_attn_mask_shape`: cuDNN takes masks of 2 or 4 dimensions without a gradient."""
    mask = request.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (*request.query.shape[:3], request.key.shape[2])
    return all(size in (1, want) for size, want in zip(mask.shape, full[-mask.dim() :], strict=True))
