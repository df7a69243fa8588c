"""Calls of operators that have rules, as a run met them, and what is passed to them at any batch size.

Two runs at different batch sizes pass numbers that lie on straight lines; the rules need no more of a tensor
than its shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planner.program import Site, Trace


class UnsteadyError(Exception):
    """Two runs are not the same loop at two batch sizes; the text says where they part."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that has a rule, as a run met it; its events are those from `start` to `end`."""

    start: int
    end: int
    site: Site
    func: Any
    args: Any  # with each tensor as its `Shape`
    out: Any
    outputs: tuple[bool, ...]  # which of the tensors that its rule makes take memory


@dataclass(slots=True)
class Calls:
    """Collects the calls of one trace; a recorder tells it of each."""

    found: list[Call] = field(default_factory=list)

    def on_kernel(
        self, start: int, end: int, site: Site, func: Any, args: Any, out: Any, outputs: Sequence[Tensor]
    ) -> None:
        """An operator has run, and its events are recorded; `outputs` are those that its rule makes."""
        takes = tuple(t.device.type == "meta" and t.untyped_storage().nbytes() > 0 for t in outputs)
        self.found.append(Call(start, end, site, func, freeze(args), freeze(out), takes))


@dataclass(frozen=True, slots=True)
class Shape:
    """As much of a tensor on meta as rules look at."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the loop: its trace, and the calls in it."""

    trace: Trace
    calls: tuple[Call, ...]


Kind = tuple[Any, Any, Any]  # operator, arguments and result of calls that are alike at every batch size


@dataclass(frozen=True, slots=True)
class Line:
    """A whole number that is a straight line in the batch size."""

    fixed: int
    slope: int


def freeze(value: Any) -> Any:
    """Arguments or results with each tensor as its `Shape`, lists as tuples."""
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    return value


def join(a: Any, b: Any, low: int, high: int) -> Any:
    """What two runs passed to one call, with a line for each number that is not the same.

    Raises UnsteadyError.
    """
    if isinstance(a, Shape) and isinstance(b, Shape):
        if a.dtype is not b.dtype or len(a.sizes) != len(b.sizes):
            raise UnsteadyError(f"a tensor has another type at batch {high} than at batch {low}")
        sizes, strides = join(a.sizes, b.sizes, low, high), join(a.strides, b.strides, low, high)
        return Shape(sizes, strides, a.dtype)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(join(one, other, low, high) for one, other in zip(a, b, strict=True))
    if type(a) is int and type(b) is int:
        return a if a == b else line_through(a, b, low, high)
    if a == b:
        return a
    raise UnsteadyError(f"an argument is {a!r} at batch {low} and {b!r} at batch {high}")


def thaw(value: Any, batch: int) -> Any:
    """What is passed at this batch size, with tensors on meta."""
    if isinstance(value, Line):
        return value.fixed + value.slope * batch
    if isinstance(value, Shape):
        sizes, strides = thaw(value.sizes, batch), thaw(value.strides, batch)
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(thaw(item, batch) for item in value)
    return value


def line_through(a: int, b: int, low: int, high: int) -> Line:
    """The line through `a` at batch `low` and `b` at batch `high`. Raises UnsteadyError."""
    slope, rest = divmod(b - a, high - low)
    if rest:
        raise UnsteadyError(
            f"{a} at batch {low} and {b} at batch {high} lie on no line through whole numbers"
        )
    return Line(a - slope * low, slope)
