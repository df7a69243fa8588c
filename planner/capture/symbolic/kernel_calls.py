"""Calls of operators that have rules, as a run met them, and what is passed to them at any batch size.

Two runs at different batch sizes pass numbers that lie on straight lines; the rules need no more of a tensor
than its shape.
"""

from dataclasses import dataclass
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from planner.program import Affine, NotAffineError, Site, Trace, affine_through


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """An operator that has a rule, as a run met it; its events are those from `start` to `end`."""

    start: int
    end: int
    site: Site
    func: Any
    args: Any  # with each tensor as its `TensorMeta`
    out: Any
    outputs: tuple[bool, ...]  # which of the tensors that its rule makes take memory
    stream: int = 0


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The part of a tensor on meta that rules look at."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class RecordedRun(Struct, frozen=True):
    """One run of the loop: its trace, and the calls in it."""

    trace: Trace
    calls: tuple[RecordedCall, ...]


# Operator, arguments and result of calls that are alike at every batch size.
KernelSignature = tuple[Any, Any, Any]


def to_meta(value: Any) -> Any:
    """Return arguments or results with each tensor as its `TensorMeta`, lists as tuples."""
    if isinstance(value, Tensor):
        return TensorMeta(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(to_meta(item) for item in value)
    return value


def fit_affine(a: Any, b: Any, low: int, high: int) -> Any:
    """Fit the arguments that two runs passed to one call, with a line for each number that differs.

    Raises NotAffineError.
    """
    if isinstance(a, TensorMeta) and isinstance(b, TensorMeta):
        if a.dtype is not b.dtype or len(a.sizes) != len(b.sizes):
            raise NotAffineError(f"a tensor has another type at batch {high} than at batch {low}")
        sizes, strides = fit_affine(a.sizes, b.sizes, low, high), fit_affine(a.strides, b.strides, low, high)
        return TensorMeta(sizes, strides, a.dtype)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(fit_affine(one, other, low, high) for one, other in zip(a, b, strict=True))
    if type(a) is int and type(b) is int:
        return a if a == b else affine_through(a, b, low, high)
    if a == b:
        return a
    raise NotAffineError(f"an argument is {a!r} at batch {low} and {b!r} at batch {high}")


def from_meta(value: Any, batch: int) -> Any:
    """Return the arguments at this batch size, with tensors on meta."""
    if isinstance(value, Affine):
        return value.fixed + value.slope * batch
    if isinstance(value, TensorMeta):
        sizes, strides = from_meta(value.sizes, batch), from_meta(value.strides, batch)
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(from_meta(item, batch) for item in value)
    return value
