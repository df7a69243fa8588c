"""Outputs of functional collectives, whose registrations for `meta` are those of a compiled graph."""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_DISPATCH = (
    "planner.capture.meta_kernels",
    "planner.capture.recorder",
    "planner.capture.values",
    "torch.utils.",
)


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
        torch.ops.aten.copy_.default: _copy,
    }


def _copy(self: Tensor, source: Tensor, *_: Any) -> Any:
    """Return the numbers that DistributedDataParallel's reducer had written before it asked other ranks.

    It is C++ and copies what the ranks agreed on back to the CPU: the order of gradients, before a forward
    pass, and which parameters got one, at the end of a backward pass (reducer.cpp of 2.13).
    """
    if self.is_meta or not source.is_meta or not _is_of_reducer(sys._getframe(1)):
        return NotImplemented
    return self


def _is_of_reducer(frame: FrameType | None) -> bool:
    """Return whether the innermost code that is not the planner's, or torch's dispatch, calls a reducer."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_DISPATCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("_pre_forward", "_engine_run_backward")


def _all_reduce(input: Tensor, *_: Any) -> Tensor:
    """Return a contiguous copy (`c10d::all_reduce` of torch/csrc/distributed/c10d/Functional.cpp)."""
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)
