"""Outputs of functional collectives, whose registrations for `meta` are those of a compiled graph."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def kernels() -> Mapping[Any, Callable[..., Any]]:
    """Return kernels by operator; none where torch.distributed has no functional collectives yet."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is None:
        return {}
    ops = torch.ops._c10d_functional
    return {
        ops._wrap_tensor_autograd.default: module.AsyncCollectiveTensor,
        ops.wait_tensor.default: lambda tensor: tensor,
        ops.all_reduce.default: _all_reduce,
    }


def _all_reduce(input: Tensor, *_: Any) -> Tensor:
    """Return a contiguous copy (`c10d::all_reduce` of torch/csrc/distributed/c10d/Functional.cpp)."""
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)
