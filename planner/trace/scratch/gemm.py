"""The workspaces that cuBLAS keeps.

ATen/cuda/CublasHandlePool.cpp: the first use of a handle takes a workspace from the caching allocator and
keeps it for ever, one per (handle, stream). Handles belong to threads, and a training process has two that
multiply matrices: the one that runs the forward pass and the one in which autograd runs the backward pass.
cuBLASLt uses the same workspace by default (unified since torch 2.11; torch 2.9 and 2.10 kept another 1
MiB).
"""

from typing import Any

import torch

from planner.events import Phase

aten = torch.ops.aten

_DEFAULT_BYTES = (2 * 4096 + 8 * 16) * 1024  # CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8
_HOPPER_BYTES = 32 * 2**20

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
    }
)


def workspace_bytes(capability: tuple[int, int]) -> int:
    """What cuBLAS keeps per handle on a GPU of this compute capability, in bytes.

    >>> workspace_bytes((8, 6)), workspace_bytes((9, 0))
    (8519680, 33554432)
    """
    return _HOPPER_BYTES if capability == (9, 0) else _DEFAULT_BYTES


class Workspaces:
    """Which thread's handle has its workspace already."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._bytes = workspace_bytes(capability)
        self._taken: set[bool] = set()

    def first_use(self, func: Any, phase: Phase) -> tuple[int, ...]:
        """Sizes in bytes that this operator makes cuBLAS take for good: one the first time in each thread."""
        if func not in OPS:
            return ()
        backward = phase is Phase.BACKWARD
        if backward in self._taken:
            return ()
        self._taken.add(backward)
        return (self._bytes,)
