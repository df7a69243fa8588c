"""Workspace rules of matrix products: memory that cuBLAS keeps, and copies of operands.

The first use of a cuBLAS handle takes a workspace from the caching allocator and keeps it for the life of the
process, one per handle and stream (ATen/cuda/CublasHandlePool.cpp). Handles belong to threads, and a training
process has two threads that multiply matrices: one runs the forward pass, the other is autograd's thread for
the backward pass. `planner.program.workspace_bytes` gives the size. cuBLASLt, which adds biases as it
multiplies, uses the same workspace or another of 1 MiB, by version (`planner.program.lt_workspace`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.capture.operator_table import overload
from planner.capture.workspaces._rule import tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, KernelOp, Ops, Rule, UseCublas
from planner.errors import UnsupportedGpuError
from planner.program import (
    LT_BYTES,
    Capability,
    LtWorkspace,
    OpKind,
    Phase,
    Target,
    TorchVersion,
    lt_workspace,
    workspace_bytes,
)

aten = torch.ops.aten

_BLAS_NAMES = """
    mm mm.out mm.dtype mm.dtype_out addmm addmm.out addmm.dtype addmm.dtype_out bmm bmm.out bmm.dtype
    bmm.dtype_out baddbmm baddbmm.out addbmm mv addmv dot vdot
    _native_multi_head_attention _euclidean_dist
"""
BLAS_OPS = frozenset(map(overload, _BLAS_NAMES.split()))
_POINTWISE_OUTER_SINCE: TorchVersion = (2, 13)
_FIRST_WITH_FP8: Capability = (8, 9)
_HOPPER, _BLACKWELL = 9, 10  # major compute capabilities


class CublasWorkspaces:
    """A record of the threads and streams whose cuBLAS handles already have workspaces."""

    def __init__(self, target: Target, config: str = "") -> None:
        """Create an empty record. `config` is the value of CUBLAS_WORKSPACE_CONFIG."""
        self._bytes = workspace_bytes(target.capability, config, target.torch)
        self._keeps_lt = lt_workspace(target.torch) is LtWorkspace.KEPT
        self._used: set[tuple[bool, int]] = set()
        self._lt_used: set[tuple[bool, int]] = set()

    def forget(self) -> None:
        """Forget all threads and streams, since torch has freed their workspaces."""
        self._used.clear()
        self._lt_used.clear()

    def first_use(self, phase: Phase, stream: int = 0) -> int:
        """Return the bytes of the cuBLAS workspace that a call allocates, or 0 if it is allocated already.

        cuBLAS keeps a workspace for each thread and stream. The call's thread and stream are recorded. The
        thread follows from the phase: autograd's thread in the backward pass, otherwise the main thread.
        """
        place = phase is Phase.BACKWARD, stream  # autograd's thread or the main thread, and the stream
        if place in self._used:
            return 0
        self._used.add(place)
        return self._bytes

    def first_lt_use(self, func: Any, args: Args, phase: Phase, stream: int = 0) -> int:
        """Return the bytes of the cuBLASLt workspace that a call allocates and keeps, or 0 if it does not.

        Returns 0 if the call's thread and stream have a workspace already, if cuBLASLt does not run the call,
        or if it keeps no workspace in this version of torch. Otherwise thread and stream are recorded.
        """
        place = phase is Phase.BACKWARD, stream
        if not self._keeps_lt or place in self._lt_used:
            return 0
        if func not in (aten.addmm.default, aten.addmm.out) or not _uses_lt(args):
            return 0
        self._lt_used.add(place)
        return LT_BYTES


def uses_cublas(func: Any, args: Args, ops: Ops, torch: TorchVersion) -> bool:
    """Return whether a call uses cuBLAS, by its operator or by the ops of its rule.

    Since torch 2.13 a batch of outer products is multiplied pointwise, without cuBLAS
    (ATen/native/cuda/Blas.cpp).
    """
    if func not in BLAS_OPS:
        return any(isinstance(one, KernelOp) and one.kind is OpKind.CUBLAS for one in ops)
    is_outer = func in (aten.bmm.default, aten.bmm.out) and args[0].shape[2] == 1
    return not is_outer or torch < _POINTWISE_OUTER_SINCE


def _uses_lt(args: Args) -> bool:
    """Return whether cuBLASLt runs a call of `addmm`.

    cuBLASLt does if the bias has one number per column, and the second matrix has more than one row and
    column (addmm_out_cuda_impl, ATen/native/cuda/Blas.cpp).
    """
    bias, _, second = args[:3]
    inner, columns = second.shape
    is_bias = bias.dim() == 1 and bias.shape[0] == columns and bias.is_contiguous()
    return bool(is_bias and inner > 1 and columns > 1)


# ---- copies of operands, since cuBLAS reads matrices with contiguous rows or columns
# (prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas, ATen/native/cuda/Blas.cpp and
# cuBlasCommonArgs.h)


def _copy_for_cublas(matrix: Tensor) -> Ops:
    """Return the op that copies an operand, or () if cuBLAS can read the operand."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    if (down == 1 and right >= max(1, rows)) or (right == 1 and down >= max(1, columns)):
        return ()
    if matrix.is_contiguous() or (matrix.dim() == 2 and matrix.t().is_contiguous()):
        return ()
    return (Hold(tensor_bytes(matrix)),)


def _product(first: int, args: Args, out: Any, target: Target) -> Ops:
    """Return the ops that copy the operands of a matrix product that cuBLAS cannot read as they are.

    The operands are the arguments at `first` and `first + 1`.
    """
    return (*_copy_for_cublas(args[first]), *_copy_for_cublas(args[first + 1]))


def _addmm(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `addmm`: copies of operands, and cuBLASLt's workspace if each call allocates one."""
    takes_own = lt_workspace(target.torch) is LtWorkspace.OF_CALL and _uses_lt(args)
    return (*_product(1, args, out, target), *((Hold(LT_BYTES),) if takes_own else ()))


def _scaled_mm(args: Args, out: Any, target: Target) -> Ops:
    """Return cuBLAS's op, or () if CUTLASS runs the product (ScaledBlas.cpp).

    CUTLASS runs products with a scale for each row and column, except on compute capability 9.0. Its
    workspace on 8.9 is not counted. Raises UnsupportedGpuError if the GPU has no products of FP8.
    """
    if target.capability < _FIRST_WITH_FP8:
        raise UnsupportedGpuError(
            "torch._scaled_mm: products of FP8 need compute capability 8.9; take newer GPUs (--gpu, --filter)"
        )
    is_by_cutlass = target.capability[0] != _HOPPER and _is_scaled_by_row(args)
    return () if is_by_cutlass else (UseCublas(),)


def _is_scaled_by_row(args: Args) -> bool:
    """Return whether a product of FP8 has a scale for each row of the first matrix and column of the second.

    `_scaled_mm_v2` gets lists of scales.
    """
    scales = args[2], args[3] if isinstance(args[3], Tensor) else args[5]
    of_rows, of_columns = (one if isinstance(one, Tensor) else one[0] for one in scales)
    is_float = of_rows.dtype is of_columns.dtype is torch.float32
    shapes = tuple(of_rows.shape), tuple(of_columns.shape)
    return is_float and shapes == ((args[0].shape[0], 1), (1, args[1].shape[1]))


def _grouped_mm(args: Args, out: Any, target: Target) -> Ops:
    """Return cuBLAS's op if a product of groups is multiplied group by group, or else ().

    One kernel multiplies all groups of bfloat16 on compute capabilities 9.x and 10.x (GroupedBlas.cpp).
    """
    is_one_kernel = args[0].dtype is torch.bfloat16 and target.capability[0] in (_HOPPER, _BLACKWELL)
    return () if is_one_kernel else (UseCublas(),)


RULES: Mapping[str, Rule] = {
    "mm bmm mm.out bmm.out mm.dtype mm.dtype_out bmm.dtype bmm.dtype_out": partial(_product, 0),
    "baddbmm baddbmm.out": partial(_product, 1),
    "addmm addmm.out addmm.dtype addmm.dtype_out": _addmm,
    "_scaled_mm _scaled_mm.out _scaled_mm_v2 _scaled_mm_v2.out": _scaled_mm,
    "_grouped_mm": _grouped_mm,
}
