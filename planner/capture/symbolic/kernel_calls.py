"""Calls of operators that have rules, as a run met them, and what is passed to them at any batch size.

Runs at different batch sizes pass numbers that lie on straight lines, or on parabolas where pairs of samples
are compared; the rules need no more of a tensor than its shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from planner.program import Affine, NotAffineError, Quadratic, Site, Trace, polynomial_through


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


def fit_arguments(values: Sequence[Any], batches: Sequence[int]) -> Any:
    """Fit the arguments that runs passed to one call, with a polynomial for each number that differs.

    Raises NotAffineError.
    """
    first = values[0]
    if all(isinstance(value, TensorMeta) for value in values):
        if any(value.dtype is not first.dtype or len(value.sizes) != len(first.sizes) for value in values):
            raise NotAffineError(
                f"a tensor has another type at batch {batches[1]} than at batch {batches[0]}"
            )
        sizes = fit_arguments([value.sizes for value in values], batches)
        strides = fit_arguments([value.strides for value in values], batches)
        return TensorMeta(sizes, strides, first.dtype)
    if all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        return tuple(fit_arguments(column, batches) for column in zip(*values, strict=True))
    if all(value == first for value in values):
        return first
    if all(type(value) is int for value in values):
        return polynomial_through(values, batches)
    raise NotAffineError(f"an argument is {first!r} at batch {batches[0]} and {values[1]!r} at {batches[1]}")


def from_meta(value: Any, batch: int) -> Any:
    """Return the arguments at this batch size, with tensors on meta."""
    if isinstance(value, Affine):
        return value.fixed + value.slope * batch
    if isinstance(value, Quadratic):
        return value.fixed + (value.slope + value.square * batch) * batch
    if isinstance(value, TensorMeta):
        sizes, strides = from_meta(value.sizes, batch), from_meta(value.strides, batch)
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(from_meta(item, batch) for item in value)
    return value
