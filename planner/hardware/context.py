"""Estimate the size of a CUDA context from the GPU's multiprocessors.

The estimate is for a context that was not measured.

    context = base + share * stacks,    stacks = 1 KiB for each thread that the GPU can hold at once.

The memory that the driver reserves for the threads of a GPU decides: local memory is in device memory, for
all threads that can run at once (CUDA C++ Programming Guide). A T4 holds 40,960 threads and takes 130 MiB, an
RTX PRO 6000 holds 288,768 and takes 690. Published figures show no difference between CUDA 11.8 to 13, nor
between compute capabilities beyond their number of threads.

All constants, in MiB, are printed by benchmarks/fits/cuda_context.py, which holds the published figures with
their origins.
"""

from math import hypot
from typing import NamedTuple

from planner.program import threads_per_sm

STACK_KIB = 1
# For processes that ran kernels of torch, cuBLAS and cuDNN, loaded on first use (torch 1.13 and later).
BASE_MIB, STACKS_SHARE, SPREAD_MIB = 69, 2.028, 40
TYPICAL_STACKS_MIB, TYPICAL_STACKS_SPREAD_MIB = 93, 74  # of the known GPUs since Turing


class ContextSize(NamedTuple):
    """The estimated size of a CUDA context, with its standard deviation."""

    mib: int
    spread_mib: int  # one standard deviation


def stacks_mib(capability: tuple[int, int], sm_count: int) -> float:
    """Return the size in MiB of the stacks of all threads that a GPU holds at once.

    >>> stacks_mib((8, 6), 28), stacks_mib((9, 0), 132)
    (42.0, 264.0)
    """
    return sm_count * threads_per_sm(capability) * STACK_KIB / 1024


def context_size(capability: tuple[int, int], sm_count: int) -> ContextSize:
    """Return the size of a CUDA context, estimated from the number of threads that the GPU can hold."""
    return ContextSize(round(BASE_MIB + STACKS_SHARE * stacks_mib(capability, sm_count)), SPREAD_MIB)


def typical_context() -> ContextSize:
    """Return the estimated CUDA context of a typical GPU, with a deviation that covers the known GPUs."""
    spread = hypot(SPREAD_MIB, STACKS_SHARE * TYPICAL_STACKS_SPREAD_MIB)
    return ContextSize(round(BASE_MIB + STACKS_SHARE * TYPICAL_STACKS_MIB), round(spread))
