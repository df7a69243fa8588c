"""Layouts of operands, and what our meta kernels and torch's give for them."""

from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.run import meta_kernels
from tests.helpers.models import AMPERE

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
RAISES = "raises"


def layout(output: Any) -> Any:
    """Return the parts of an output that decide memory; the same nesting."""
    if isinstance(output, Tensor):
        assert output.is_meta
        return tuple(output.shape), output.stride(), output.dtype, output.untyped_storage().nbytes()
    return tuple(map(layout, output)) if isinstance(output, tuple | list) else output


def torchs(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The layout that torch's own meta kernel gives, or that it raises."""
    try:
        return layout(func(*args, **kwargs))
    except (
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
        NotImplementedError,
        AssertionError,
        ArithmeticError,
    ):
        return RAISES


def allowed(func: Any, *args: Any) -> tuple[Any, ...]:
    """Return the answers that a pointwise shortcut may give: none, that of torch's meta kernel or that of its
    CPU kernel, which puts strides in order as CUDA's does where only dimensions of size 1 tell formats apart.
    """

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).fill_(1)

    def on_cpu(*values: Any) -> Tensor:
        result = func(*map(real, values))
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")

    return NotImplemented, torchs(func, *args), torchs(on_cpu, *args)


def ours(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The layout that the shortcut gives."""
    out = meta_kernels(AMPERE)[func](*args, **kwargs)
    return out if out is NotImplemented else layout(out)


# ---- kernels that CUDA lays out otherwise: as torch for contiguous inputs, by their own rule for others


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in the channels-last format."""
    return meta(*shape, dtype=dtype).to(memory_format=torch.channels_last)


def agrees(func: Any, *args: Any) -> None:
    """The shortcut answers, and as torch's meta kernel does."""
    assert ours(func, *args) == torchs(func, *args) != RAISES
