"""`dropout` as on CUDA: one fused kernel that saves a boolean mask (ATen/native/Dropout.cpp)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return aten.native_dropout(x, p, True)[0]


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel."""
    return {"dropout": _dropout}
