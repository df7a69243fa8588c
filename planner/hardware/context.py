"""Estimate a CUDA context that was not measured: by the multiprocessors of the GPU.

    context = base + share * stacks,    stacks = 1 KiB for each thread that the GPU can hold at once.

What the driver sets aside for the threads of a GPU decides: local memory lies in device memory, for as many
threads as can run at once (CUDA C++ Programming Guide). A T4 holds 40,960 of them and takes 130 MiB, an RTX
PRO 6000 holds 288,768 and takes 690. CUDA 11.8 to 13 make no difference that the published figures show, nor
do compute capabilities beyond their threads.

All constants, in MiB, are printed by benchmarks/fits/cuda_context.py, which holds the published figures with
their origins.
"""

from math import hypot
from typing import NamedTuple

from planner.program import threads_per_sm

STACK_KIB = 1
# Of processes that ran kernels of torch, cuBLAS and cuDNN, loaded as they were used (torch 1.13 and later).
BASE_MIB, STACKS_SHARE, SPREAD_MIB = 69, 2.028, 40
TYPICAL_STACKS_MIB, TYPICAL_STACKS_SPREAD_MIB = 93, 74  # of the known GPUs from Turing on


class ContextSize(NamedTuple):
    """The memory of a process outside torch's allocator."""

    mib: int
    spread_mib: int  # one standard deviation


def stacks_mib(capability: tuple[int, int], sm_count: int) -> float:
    """Return the size of a stack for each thread that the GPU can hold at once.

    >>> stacks_mib((8, 6), 28), stacks_mib((9, 0), 132)
    (42.0, 264.0)
    """
    return sm_count * threads_per_sm(capability) * STACK_KIB / 1024


def context_size(capability: tuple[int, int], sm_count: int) -> ContextSize:
    """Return the context of a GPU whose multiprocessors are known."""
    return ContextSize(round(BASE_MIB + STACKS_SHARE * stacks_mib(capability, sm_count)), SPREAD_MIB)


def typical_context() -> ContextSize:
    """Return the context of the median GPU, with the deviation of all of them."""
    spread = hypot(SPREAD_MIB, STACKS_SHARE * TYPICAL_STACKS_SPREAD_MIB)
    return ContextSize(round(BASE_MIB + STACKS_SHARE * TYPICAL_STACKS_MIB), round(spread))
