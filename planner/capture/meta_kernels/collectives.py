"""Meta kernels for functional collectives.

torch's meta kernels are made for compiled graphs.
"""

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
    """Return meta kernels for functional collectives and `copy_`, or {} if the former are not imported."""
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
    """Return `self` unchanged if DDP's reducer copies a meta tensor to the CPU, or else NotImplemented.

    The C++ reducer copies the numbers on which ranks agreed back to the CPU: before a forward pass the order
    of gradients, after a backward pass which parameters got a gradient (reducer.cpp of 2.13).
    """
    if self.is_meta or not source.is_meta or not _is_of_reducer(sys._getframe(1)):
        return NotImplemented
    return self


def _is_of_reducer(frame: FrameType | None) -> bool:
    """Return whether DDP's reducer called the operator that runs in `frame`.

    Frames of the planner and of torch's dispatch are skipped.
    """
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_DISPATCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("_pre_forward", "_engine_run_backward")


def _all_reduce(input: Tensor, *_: Any) -> Tensor:
    """Return a new contiguous tensor of the input's shape and dtype.

    Source: c10d/Functional.cpp, all_reduce.
    """
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)
