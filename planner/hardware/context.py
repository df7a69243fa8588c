"""Estimate a CUDA context that was not measured: by multiprocessors, loading of kernels, libraries.

    context = base + share * stacks,    stacks = 1 KiB for each thread that the GPU can hold at once.

What the driver sets aside for the threads of a GPU decides: local memory lies in device memory, for as many
threads as can run at once (CUDA C++ Programming Guide). A T4 holds 40,960 of them and takes 130 MiB, an RTX
PRO 6000 holds 288,768 and takes 690. CUDA 11.8 to 13 make no difference that the published figures show, nor
do compute capabilities beyond their threads; loading all kernels at once, as torch did before 1.13, adds
more than all of it.

All constants, in MiB, are printed by benchmarks/fits/cuda_context.py, which holds the published figures with
their origins.
"""

from enum import StrEnum
from math import hypot

from msgspec import Struct

from planner.program import threads_per_sm

STACK_KIB = 1

# Of processes that ran kernels of torch, cuBLAS and cuDNN, loaded as they were used.
BASE_MIB, STACKS_SHARE, SPREAD_MIB = 69, 2.028, 40
TYPICAL_STACKS_MIB, TYPICAL_STACKS_SPREAD_MIB = 93, 74  # of the known cards from Turing on
STEPS_MIB, STEPS_SPREAD_MIB = 70, 29  # of that, what cuBLAS and cuDNN load in the first steps
# Loaded at once, as torch did before 1.13: its own kernels and cuBLAS's; cuDNN's where it is used.
EAGER_MIB, EAGER_SPREAD_MIB = 730, 244
EAGER_CUDNN_MIB = 666


class Loading(StrEnum):
    """The time at which kernels are loaded: CUDA_MODULE_LOADING."""

    LAZY = "lazy"  # the default since CUDA 11.7 and torch 1.13
    EAGER = "eager"


class Libraries(StrEnum):
    """The libraries that are loaded besides torch's own kernels."""

    NONE = "none"  # one small tensor was made
    TRAINING = "training"  # cuBLAS and cuDNN have run some steps


class ContextSize(Struct, frozen=True):
    """The memory of a process outside torch's allocator."""

    mib: int
    spread_mib: int  # one standard deviation


def loading_of(torch: str) -> Loading:
    """Return when a version of torch loads kernels by default.

    >>> loading_of("1.12.1+cu113"), loading_of("2.11.0+cu128")
    (<Loading.EAGER: 'eager'>, <Loading.LAZY: 'lazy'>)
    """
    major, minor = (int(part) for part in torch.partition("+")[0].split(".")[:2])
    return Loading.LAZY if (major, minor) >= (1, 13) else Loading.EAGER


def stacks_mib(capability: tuple[int, int], multiprocessors: int) -> float:
    """Return the size of a stack for each thread that the GPU can hold at once.

    >>> stacks_mib((8, 6), 28), stacks_mib((9, 0), 132)
    (42.0, 264.0)
    """
    return multiprocessors * threads_per_sm(capability) * STACK_KIB / 1024


def typical_context(
    loading: Loading = Loading.LAZY, libraries: Libraries = Libraries.TRAINING
) -> ContextSize:
    """Return the context of the median GPU, with the deviation of all of them."""
    known = _size(TYPICAL_STACKS_MIB, loading, libraries)
    return ContextSize(known.mib, round(hypot(known.spread_mib, STACKS_SHARE * TYPICAL_STACKS_SPREAD_MIB)))


def context_size(
    capability: tuple[int, int],
    multiprocessors: int,
    loading: Loading = Loading.LAZY,
    libraries: Libraries = Libraries.TRAINING,
) -> ContextSize:
    """Return the context of a GPU whose multiprocessors are known."""
    return _size(stacks_mib(capability, multiprocessors), loading, libraries)


def _size(stacks: float, loading: Loading, libraries: Libraries) -> ContextSize:
    mib, spreads = BASE_MIB + STACKS_SHARE * stacks, [float(SPREAD_MIB)]
    if libraries is Libraries.NONE or loading is Loading.EAGER:
        mib, spreads = mib - STEPS_MIB, [*spreads, STEPS_SPREAD_MIB]
    if loading is Loading.EAGER:
        mib, spreads = mib + EAGER_MIB, [*spreads, EAGER_SPREAD_MIB]
        if libraries is Libraries.TRAINING:
            mib += EAGER_CUDNN_MIB
    return ContextSize(round(mib), round(hypot(*spreads)))
