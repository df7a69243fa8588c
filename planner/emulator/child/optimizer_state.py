"""Keep the numbers of an optimizer's state readable on the GPU while it steps or is saved.

`torch.load(..., map_location="cuda")` puts Adam's count of steps on the GPU. Adam reads the count there and
divides by `1 - beta ** count`, so that a count that reads as zero would end a resumed training.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from .script_logger import tensors_in

_MOST_BYTES = 4  # largest size of a number that otherwise reads as zero; larger numbers are stored data
_ANY_NUMBER = 2**32 - 1  # number of reads that stands for no limit


def keep_numbers_readable(torch: Any, core: Any) -> None:
    """Let steps of optimizers and `torch.save` read tensors of one element that were copied to the GPU.

    The tensors are of the optimizer's state or of the saved object, and have at most 4 bytes. The reads are
    allowed only during a step or a call of `torch.save`.
    """

    def allow(held: Any, reads: int) -> None:
        if not torch.compiler.is_compiling():
            for number in _numbers(torch, held):
                address, size_bytes = number.data_ptr(), number.element_size()
                core.emu_allow_reads(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), reads)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        allow(list(optimizer.state.values()), _ANY_NUMBER)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        allow(list(optimizer.state.values()), 0)

    optimizers = import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)
    plain = torch.save

    @functools.wraps(plain)
    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        allow(obj, _ANY_NUMBER)
        try:
            plain(obj, *args, **kwargs)
        finally:
            allow(obj, 0)

    torch.save = save


def _numbers(torch: Any, held: Any) -> Iterator[Any]:
    for value in tensors_in(torch, held):
        is_number = type(value) is torch.Tensor and value.is_cuda and value.numel() == 1
        if is_number and value.element_size() <= _MOST_BYTES:
            yield value
