"""What optimizers and gradient clipping do on CUDA and not on meta.

Multi-tensor kernels get addresses and sizes as arguments of the kernel, not in device memory
(ATen/native/cuda/MultiTensorApply.cuh), and the fused optimizers take nothing besides
(ATen/native/cuda/FusedAdamKernel.cu, FusedSgdKernel.cu, FusedAdagradKernel.cu). So all that is left is which
implementation Python chooses, and the one kernel with scratch memory of its own, the norm.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

# ATen/native/cuda/MultiTensorApply.cuh: elements that a block of threads works on.
_CHUNK = 65_536
_HALVES = (torch.float16, torch.bfloat16)  # accumulated in float32 (ATen/OpMathType.h)


def device_lists() -> Iterator[tuple[str, object]]:
    """Python code that asks for which devices foreach and fused implementations exist."""
    # torch/optim/optimizer.py takes foreach by default where all parameters lie on such a device.
    yield "torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"]
    yield "torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["cuda", "meta"]
    # torch/nn/utils/clip_grad.py asks by `_has_foreach_support`, which stands here.
    yield "torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"]
    # AveragedModel without an averaging function of the user's
    yield "torch.optim.swa_utils._get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"]


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel."""
    return {"_foreach_norm.Scalar": _foreach_norm}


def _foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The norm of each tensor (ATen/native/cuda/ForeachReduceOp.cu).

    Partial results of each chunk are taken first, as many for each tensor as the largest one needs, and
    given back after the norms are there, which are tensors of their own.
    """
    first = tensors[0]
    if not _is_fast(tensors, ord):
        return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]
    out = dtype or first.dtype
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    accumulated = torch.float32 if out in _HALVES else out
    partial = torch.zeros(len(tensors) * chunks, dtype=accumulated, device=first.device)
    norms = [torch.empty((), dtype=out, device=first.device) for _ in tensors]
    del partial
    return norms


def _is_fast(tensors: Sequence[Tensor], ord: float) -> bool:
    """Whether one kernel does all tensors (ATen/native/ForeachUtils.h, can_use_fast_route)."""
    first = tensors[0]
    alike = all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
    dense = all(map(_is_dense, tensors))
    return alike and dense and first.is_floating_point() and ord in (1, 2, inf)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True
