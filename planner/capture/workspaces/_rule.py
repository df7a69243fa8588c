"""Helpers of workspace rules: sizes of tensors, arguments of calls, and copies that kernels make."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import is_in_format, suggests_channels_last
from planner.capture.workspaces.ops import Hold, Op, Ops, Release


def released(held: Sequence[Op]) -> Ops:
    """Return the op that releases the last `len(held)` held blocks, or () if `held` is empty."""
    return (Release(len(held)),) if held else ()


def argument(args: tuple[Any, ...], position: int, default: Any = None) -> Any:
    """Return the argument at a position, or `default` if torch passed fewer arguments."""
    return args[position] if len(args) > position else default


def tensor_bytes(t: Tensor) -> int:
    """Return the bytes of a contiguous copy of a tensor.

    >>> import torch
    >>> tensor_bytes(torch.empty(2, 3, device="meta").expand(4, 2, 3))
    96
    """
    return t.numel() * t.element_size()


def contiguous_copies(*tensors: Tensor | None) -> Ops:
    """Return a `Hold` op for each tensor that `contiguous()` copies."""
    return tuple(Hold(tensor_bytes(t)) for t in tensors if t is not None and not t.is_contiguous())


def positional_args(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
    """Return a call's arguments as one tuple, with arguments given by name at their places in the schema.

    If arguments are given by name, arguments that are not given get their defaults.

    >>> import torch
    >>> x = torch.empty(2)
    >>> positional_args(torch.ops.aten.sort.stable, (x,), {"stable": True})[1:]
    (True, -1, False)
    """
    if not kwargs:
        return args
    rest = func._schema.arguments[len(args) :]
    return (*args, *(kwargs.get(a.name, a.default_value) for a in rest))


def dense_copies(*tensors: Tensor | None) -> Ops:
    """Return a `Hold` op for each tensor that is neither contiguous nor in channels last.

    Kernels that also read tensors in the format of `suggest_memory_format` make these copies.
    """
    given = [t for t in tensors if t is not None and not t.is_contiguous()]
    return tuple(Hold(tensor_bytes(t)) for t in given if not _is_channels_last(t))


def copies_in_format_of(x: Tensor, *others: Tensor | None) -> Ops:
    """Return a `Hold` op for each tensor in `others` that must be copied to the format of `x`."""
    if not suggests_channels_last(x):
        return contiguous_copies(*others)
    given = [t for t in others if t is not None]
    return tuple(Hold(tensor_bytes(t)) for t in given if not is_in_format(t.shape, t.stride(), is_last=True))


def _is_channels_last(t: Tensor) -> bool:
    return suggests_channels_last(t) and is_in_format(t.shape, t.stride(), is_last=True)


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient of two integers, rounded up."""
    return -(-number // divisor)


def floor_power_of_2(number: int) -> int:
    """Return the largest power of two that is at most a number, or 1 if the number is below 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def accumulator_bytes(x: Tensor) -> int:
    """Return the bytes per element of the float type in which kernels accumulate a tensor's values.

    Source: ATen/AccumulateType.h.
    """
    return 8 if x.dtype is torch.float64 else 4
