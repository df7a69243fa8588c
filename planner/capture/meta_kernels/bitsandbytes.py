"""Meta kernels for bitsandbytes' operators.

The sizes in bitsandbytes' own meta kernels depend on values.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def kernels() -> Mapping[Any, Callable[..., Any]]:
    """Return meta kernels for two operators of bitsandbytes, by operator, or {} if it is not imported."""
    if "bitsandbytes" not in sys.modules:
        return {}
    ops = torch.ops.bitsandbytes
    return {
        ops.int8_vectorwise_quant.default: _int8_vectorwise_quant,
        ops.int8_mixed_scaled_mm.default: _int8_mixed_scaled_mm,
    }


def _int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: N803
    """Return the quantized tensor, its row scales, and an empty tensor of outliers (None for threshold 0)."""
    rows = A.new_empty(A.numel() // A.shape[-1], dtype=torch.float32)
    outliers = A.new_empty(0, dtype=torch.int64) if threshold > 0.0 else None
    return A.new_empty(A.shape, dtype=torch.int8), rows, outliers


def _int8_mixed_scaled_mm(A: Tensor, CA: Tensor, CB: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Return the product, and an empty tensor in place of outlier columns."""
    return A.new_empty((*CA.shape[:-1], CB.shape[0])), A.new_empty(0)
