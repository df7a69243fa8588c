"""Represent calls of operators with workspace rules, and fit the arguments to the batch size.

Numbers in the arguments are affine in the batch size, or quadratic if pairs of samples are compared. The
rules need only the shape, strides and dtype of a tensor, and whether it is on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from planner.capture.arguments import as_cpu_tensor, is_on_cpu
from planner.program import Affine, NotAffineError, Quadratic, Site, Trace, polynomial_through


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call of an operator that has a workspace rule.

    `start` and `end` delimit the call's events in the trace.
    """

    start: int
    end: int
    site: Site
    func: Any
    args: Any  # with each tensor replaced by a `TensorMeta`
    out: Any
    outputs: tuple[bool, ...]  # for each tensor that its rule makes, whether it takes memory
    stream: int = 0


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The sizes, strides and dtype of a tensor, and whether it is on the CPU, for workspace rules."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool = False


class RecordedRun(Struct, frozen=True):
    """One captured run of the loop: its trace, and the calls of operators that have rules."""

    trace: Trace
    calls: tuple[RecordedCall, ...]


# Operator, arguments and result of a call, with polynomials for numbers that depend on the batch size.
KernelSignature = tuple[Any, Any, Any]


def to_meta(value: Any) -> Any:
    """Return a call's arguments or result with tensors replaced by `TensorMeta`, and lists by tuples."""
    if isinstance(value, Tensor):
        return TensorMeta(tuple(value.shape), tuple(value.stride()), value.dtype, is_on_cpu(value))
    if isinstance(value, (list, tuple)):
        return tuple(to_meta(item) for item in value)
    return value


def fit_arguments(values: Sequence[Any], batches: Sequence[int]) -> Any:
    """Fit polynomials in the batch size to the numbers in a call's arguments that differ between runs.

    Returns the arguments with these polynomials. `values` has the arguments of each run, `batches` the batch
    size of each run. Raises NotAffineError if other values differ, or if no polynomial fits.
    """
    first = values[0]
    if all(isinstance(value, TensorMeta) for value in values):
        if any(value.dtype is not first.dtype or len(value.sizes) != len(first.sizes) for value in values):
            raise NotAffineError(
                f"a tensor has another type at batch {batches[1]} than at batch {batches[0]}"
            )
        sizes = fit_arguments([value.sizes for value in values], batches)
        strides = fit_arguments([value.strides for value in values], batches)
        return TensorMeta(sizes, strides, first.dtype, first.on_cpu)
    if all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        return tuple(fit_arguments(column, batches) for column in zip(*values, strict=True))
    if all(value == first for value in values):
        return first
    if all(type(value) is int for value in values):
        return polynomial_through(values, batches)
    raise NotAffineError(f"an argument is {first!r} at batch {batches[0]} and {values[1]!r} at {batches[1]}")


def at_batch(value: Any, batch: int) -> Any:
    """Return fitted arguments at a batch size, with a `TensorMeta` for each tensor."""
    if isinstance(value, Affine):
        return value.fixed + value.slope * batch
    if isinstance(value, Quadratic):
        return value.fixed + (value.slope + value.square * batch) * batch
    if isinstance(value, TensorMeta):
        sizes, strides = at_batch(value.sizes, batch), at_batch(value.strides, batch)
        return TensorMeta(sizes, strides, value.dtype, value.on_cpu)
    if isinstance(value, tuple):
        return tuple(at_batch(item, batch) for item in value)
    return value


def from_meta(value: Any) -> Any:
    """Return evaluated arguments with each `TensorMeta` replaced by an empty meta tensor."""
    if isinstance(value, TensorMeta):
        tensor = torch.empty_strided(value.sizes, value.strides, dtype=value.dtype, device="meta")
        return as_cpu_tensor(tensor) if value.on_cpu else tensor
    if isinstance(value, tuple):
        return tuple(from_meta(item) for item in value)
    return value
