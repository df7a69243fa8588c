"""How large a CUDA context is that nobody has measured: by multiprocessors, loading of kernels, libraries.

    context = base + stacks + what the first steps load,

`stacks` being a stack for each thread that the GPU can hold at once, which the driver sets aside
[inferred from the CUDA C++ Programming Guide: local memory lies in device memory, and a thread's stack is
1 KiB unless `cudaLimitStackSize` says otherwise]. The rest are means of published figures. They are few,
their GPUs are mostly not told, and they differ by a third: so the spread is wide, and a calibration
replaces all of it.

All constants, in MiB, are printed by benchmarks/fit_context.py, which holds the published figures with
their origins.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import hypot

# Threads that a multiprocessor holds (CUDA C++ Programming Guide, technical specifications); 2,048 elsewhere.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_MOST_THREADS = 2048
STACK_KIB = 1

LAZY_MIB, LAZY_SPREAD_MIB = 345, 81  # with one small tensor, kernels loaded as they are used
LAZY_STACKS_MIB = 123  # of the GPUs behind that figure, as far as known
STEPS_MIB, STEPS_SPREAD_MIB = 70, 29  # what cuBLAS and cuDNN load in the first steps
# Loaded at once, as torch did before 1.13: its own kernels and cuBLAS's; cuDNN's where it is used.
EAGER_MIB, EAGER_SPREAD_MIB = 622, 275
EAGER_CUDNN_MIB = 666


class Loading(StrEnum):
    """When kernels are loaded: CUDA_MODULE_LOADING."""

    LAZY = "lazy"  # the default since CUDA 11.7 and torch 1.13
    EAGER = "eager"


class Libraries(StrEnum):
    """What has been loaded besides torch's own kernels."""

    NONE = "none"  # one small tensor was made
    TRAINING = "training"  # cuBLAS and cuDNN have run some steps


@dataclass(frozen=True, slots=True)
class ContextSize:
    """Of a process, outside torch's allocator."""

    mib: int
    spread_mib: int  # one standard deviation


def stacks_mib(capability: tuple[int, int], multiprocessors: int) -> float:
    """A stack for each thread that the GPU can hold at once.

    >>> stacks_mib((8, 6), 28), stacks_mib((9, 0), 132)
    (42.0, 264.0)
    """
    return multiprocessors * _THREADS.get(capability, _MOST_THREADS) * STACK_KIB / 1024


def typical_context(
    loading: Loading = Loading.LAZY, libraries: Libraries = Libraries.TRAINING
) -> ContextSize:
    """Of a GPU of which nothing is known."""
    mib, spreads = LAZY_MIB, [LAZY_SPREAD_MIB]
    if loading is Loading.EAGER:
        mib, spreads = mib + EAGER_MIB, [*spreads, EAGER_SPREAD_MIB]
    if libraries is Libraries.TRAINING and loading is Loading.EAGER:
        mib += EAGER_CUDNN_MIB
    elif libraries is Libraries.TRAINING:
        mib, spreads = mib + STEPS_MIB, [*spreads, STEPS_SPREAD_MIB]
    return ContextSize(mib, round(hypot(*spreads)))


def context_size(
    capability: tuple[int, int],
    multiprocessors: int,
    loading: Loading = Loading.LAZY,
    libraries: Libraries = Libraries.TRAINING,
) -> ContextSize:
    """Of a GPU whose multiprocessors are known: the typical one, with its own stacks in place of the typical.

    Since the stacks are inferred, half of the difference that they make counts as one more deviation.
    """
    typical = typical_context(loading, libraries)
    change = stacks_mib(capability, multiprocessors) - LAZY_STACKS_MIB
    return ContextSize(round(typical.mib + change), round(hypot(typical.spread_mib, change / 2)))
