"""`linear` as on CUDA.

ATen/native/Linear.cpp adds the bias in place, but out of place for tensors on meta or under a dispatch mode
(TensorSubclassLikeUtils.h), which would cost a second output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if bias is None or weight.dim() != 2:
        return torch.matmul(x, weight.t()) if bias is None else torch.matmul(x, weight.t()).add_(bias)
    if x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    if x.is_contiguous():  # of any rank, 1 included, since torch 2.13 at the latest
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    return torch.matmul(x, weight.t()).add_(bias)


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel."""
    return {"linear": _linear}
