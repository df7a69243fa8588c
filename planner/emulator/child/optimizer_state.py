"""Keep the numbers of an optimizer's state readable on the GPU during a step.

`torch.load(..., map_location="cuda")` puts Adam's count of steps on the GPU. Adam reads the count there and
divides by `1 - beta ** count`, so that a count that reads as zero would end a resumed training.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from .script_logger import tensors_in

_MOST_BYTES = 4  # largest size of a number that otherwise reads as zero; larger numbers are stored data
_ANY_NUMBER = 2**32 - 1  # number of reads that stands for no limit


def keep_numbers_readable(torch: Any, core: Any) -> None:
    """Let optimizers read the numbers of their state that were copied to the GPU.

    Hooks allow the reads only during a step.
    """

    def allow(optimizer: Any, reads: int) -> None:
        if not torch.compiler.is_compiling():
            for number in _numbers(torch, optimizer):
                address, size_bytes = number.data_ptr(), number.element_size()
                core.emu_allow_reads(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), reads)

    optimizers = import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: allow(optimizer, _ANY_NUMBER))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: allow(optimizer, 0))


def _numbers(torch: Any, optimizer: Any) -> Iterator[Any]:
    for value in tensors_in(torch, list(optimizer.state.values())):
        is_number = type(value) is torch.Tensor and value.is_cuda and value.numel() == 1
        if is_number and value.element_size() <= _MOST_BYTES:
            yield value
