"""`softmax` and `log_softmax` as on CUDA.

ATen/native/SoftMax.cpp: float16 goes to float32 inside the kernel on CUDA. On other devices, and from
bfloat16 everywhere, the input is converted first, which costs a tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax(x, dim, True)
    return aten._softmax(x if dtype is None else x.to(dtype), dim, False)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax(x, dim, True)
    return aten._log_softmax(x if dtype is None else x.to(dtype), dim, False)


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel."""
    return {"softmax.int": _softmax, "log_softmax.int": _log_softmax}
