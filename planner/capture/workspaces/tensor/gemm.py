"""Workspaces of matrix products: those that cuBLAS keeps, and copies of operands that it cannot read.

ATen/cuda/CublasHandlePool.cpp: the first use of a handle takes a workspace from the caching allocator and
keeps it for ever, one per (handle, stream). Handles belong to threads, and a training process has two that
multiply matrices: the one that runs the forward pass and the one in which autograd runs the backward pass.
Its size is that of `planner.program.workspace_bytes`. cuBLASLt, which adds biases as it multiplies, uses the
same one or another of 1 MiB, by version (`planner.program.lt_workspace`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.capture.operator_table import overload
from planner.capture.workspaces._rule import tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, KernelOp, Ops, Rule
from planner.program import LT_BYTES, LtWorkspace, OpKind, Phase, Target, lt_workspace, workspace_bytes

aten = torch.ops.aten

_BLAS_NAMES = """
    mm mm.out mm.dtype mm.dtype_out addmm addmm.out addmm.dtype addmm.dtype_out bmm bmm.out bmm.dtype
    bmm.dtype_out baddbmm baddbmm.out addbmm mv addmv dot vdot
    _native_multi_head_attention _euclidean_dist _scaled_mm _scaled_mm.out
"""
BLAS_OPS = frozenset(map(overload, _BLAS_NAMES.split()))


class CublasWorkspaces:
    """The threads and streams whose cuBLAS handle has its workspace already."""

    def __init__(self, target: Target, config: str = "") -> None:
        """`config` is the text of CUBLAS_WORKSPACE_CONFIG."""
        self._bytes = workspace_bytes(target.capability, config, target.torch)
        self._keeps_lt = lt_workspace(target.torch) is LtWorkspace.KEPT
        self._used: set[tuple[bool, int]] = set()
        self._lt_used: set[tuple[bool, int]] = set()

    def forget(self) -> None:
        """Let each thread begin anew, since the workspaces are freed."""
        self._used.clear()
        self._lt_used.clear()

    def first_use(self, phase: Phase, stream: int = 0) -> int:
        """Return the bytes that cuBLAS allocates and keeps in this call: 0 after the first of a thread and
        stream.
        """
        place = phase is Phase.BACKWARD, stream  # autograd's thread, or the main one
        if place in self._used:
            return 0
        self._used.add(place)
        return self._bytes

    def first_lt_use(self, func: Any, args: Args, phase: Phase, stream: int = 0) -> int:
        """Return the bytes that cuBLASLt allocates and keeps in this call, as `first_use` does of cuBLAS."""
        place = phase is Phase.BACKWARD, stream
        if not self._keeps_lt or place in self._lt_used:
            return 0
        if func not in (aten.addmm.default, aten.addmm.out) or not _uses_lt(args):
            return 0
        self._lt_used.add(place)
        return LT_BYTES


def uses_cublas(func: Any, args: Args, ops: Ops) -> bool:
    """Return whether a call multiplies matrices by cuBLAS: by its operator, or by the ops of its rule.

    Columns are multiplied by rows pointwise in torch 2.13 (ATen/native/cuda/Blas.cpp).
    """
    if func not in BLAS_OPS:
        return any(isinstance(one, KernelOp) and one.kind is OpKind.CUBLAS for one in ops)
    return func not in (aten.bmm.default, aten.bmm.out) or args[0].shape[2] != 1


def _uses_lt(args: Args) -> bool:
    """Return whether `addmm` runs in cuBLASLt: of a bias per column and more than one row and column
    (addmm_out_cuda_impl, ATen/native/cuda/Blas.cpp).
    """
    bias, _, second = args[:3]
    inner, columns = second.shape
    is_bias = bias.dim() == 1 and bias.shape[0] == columns and bias.is_contiguous()
    return bool(is_bias and inner > 1 and columns > 1)


# ---- copies of operands, since cuBLAS reads rows or columns that are next to each other
# (prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas, ATen/native/cuda/Blas.cpp and
# cuBlasCommonArgs.h)


def _copy_for_cublas(matrix: Tensor) -> Ops:
    """Copy an operand whose last two dimensions are no matrix that cuBLAS reads."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    if (down == 1 and right >= max(1, rows)) or (right == 1 and down >= max(1, columns)):
        return ()
    if matrix.is_contiguous() or (matrix.dim() == 2 and matrix.t().is_contiguous()):
        return ()
    return (Hold(tensor_bytes(matrix)),)


def _product(first: int, args: Args, out: Any, target: Target) -> Ops:
    """Copy both operands, of which the first is the argument at this position."""
    return (*_copy_for_cublas(args[first]), *_copy_for_cublas(args[first + 1]))


def _addmm(args: Args, out: Any, target: Target) -> Ops:
    """Copy both operands, and hold cuBLASLt's workspace in versions in which each call takes its own."""
    takes_own = lt_workspace(target.torch) is LtWorkspace.OF_CALL and _uses_lt(args)
    return (*_product(1, args, out, target), *((Hold(LT_BYTES),) if takes_own else ()))


RULES: Mapping[str, Rule] = {
    "mm bmm mm.out bmm.out mm.dtype mm.dtype_out bmm.dtype bmm.dtype_out": partial(_product, 0),
    "baddbmm baddbmm.out": partial(_product, 1),
    "addmm addmm.out addmm.dtype addmm.dtype_out": _addmm,
}
