"""Matrix products: the workspaces that cuBLAS keeps, and the copies of operands that it cannot read.

ATen/cuda/CublasHandlePool.cpp: the first use of a handle takes a workspace from the caching allocator and
keeps it for ever, one per (handle, stream). Handles belong to threads, and a training process has two that
multiply matrices: the one that runs the forward pass and the one in which autograd runs the backward pass.
cuBLASLt uses the same workspace by default (unified since torch 2.11; torch 2.9 and 2.10 kept another 1
MiB). How large it is says `planner.program.cublas`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.steps import Held, Rule, Step, tensor_bytes
from planner.program import Phase, Target, workspace_bytes

aten = torch.ops.aten

OPS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.vdot.default,
        aten._native_multi_head_attention.default,
        aten._euclidean_dist.default,
    }
)


class Workspaces:
    """Which thread's handle has its workspace already."""

    def __init__(self, capability: tuple[int, int], config: str = "") -> None:
        """`config` is the text of CUBLAS_WORKSPACE_CONFIG."""
        self._bytes = workspace_bytes(capability, config)
        self._taken: set[bool] = set()

    def first_use(self, func: Any, args: tuple[Any, ...], phase: Phase) -> tuple[int, ...]:
        """Sizes in bytes that this operator makes cuBLAS take for good: one the first time in each thread."""
        if func not in OPS or _is_outer_product(func, args):
            return ()
        backward = phase is Phase.BACKWARD
        if backward in self._taken:
            return ()
        self._taken.add(backward)
        return (self._bytes,) if self._bytes else ()


def _is_outer_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Columns times rows, which torch multiplies pointwise (torch 2.13, ATen/native/cuda/Blas.cpp)."""
    return func is aten.bmm.default and args[0].shape[2] == 1


# ---- operands that are copied, since cuBLAS wants rows or columns next to each other
# (prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas, ATen/native/cuda/Blas.cpp and
# cuBlasCommonArgs.h)


def _unreadable(matrix: Tensor) -> tuple[Step, ...]:
    """The copy of one operand, the last two dimensions of which are a matrix."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    if (down == 1 and right >= max(1, rows)) or (right == 1 and down >= max(1, columns)):
        return ()
    if matrix.is_contiguous() or (matrix.dim() == 2 and matrix.t().is_contiguous()):
        return ()
    return (Held(tensor_bytes(matrix)),)


def _of_two(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    return (*_unreadable(args[0]), *_unreadable(args[1]))


def _of_three(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The first argument is added to the product."""
    return (*_unreadable(args[1]), *_unreadable(args[2]))


RULES: Mapping[Any, Rule] = {
    aten.mm.default: _of_two,
    aten.bmm.default: _of_two,
    aten.addmm.default: _of_three,
    aten.baddbmm.default: _of_three,
}
