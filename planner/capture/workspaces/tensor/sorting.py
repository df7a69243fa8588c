"""Scratch memory of sorting and of what is built on it.

ATen/native/cuda/Sort.cpp, Sort.cu, SortStable.cu, TensorTopK.cpp and Sorting.cpp; the temporary storage of
CUB's radix sort.
"""

from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.steps import Held, Made, Rule, Step, argument, tensor_bytes
from planner.program import Target

aten = torch.ops.aten

_SMALL = 4096  # up to here, rows are sorted in place (should_use_small_sort)
_LARGE = 1_000_000  # from here on, rows are sorted one after the other


def radix_sort_bytes(many: int, key_bytes: int, value_bytes: int) -> int:
    """Temporary storage of CUB's radix sort of so many pairs; about.

    The other halves of the double buffers, and 1 KiB of digit counts for each block of some 7,680 pairs
    (cub/device/dispatch/dispatch_radix_sort.cuh, onesweep; the block's size is from memory and differs by
    GPU and type).
    """
    return many * (key_bytes + value_bytes) + 1024 * (8 + -(-many // 7680))


def _sort(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    return sort_steps(args[0], argument(args, 1, -1))


def _sort_stable(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    return sort_steps(args[0], argument(args, 2, -1))


def sort_steps(x: Tensor, dim: int) -> tuple[Step, ...]:
    """What sorting along this dimension takes, after values and indices are made."""
    if x.dim() == 0 or x.numel() == 0:
        return ()
    row = x.shape[dim]
    if row <= _SMALL:
        return (8 * row,)  # the numbers 0, 1, 2, ...
    many, unit = x.numel(), x.element_size()
    rows = many // row
    steps: list[Step] = [Made.REST]
    if x.stride(dim) != 1:
        steps += [Held(many * unit), Held(many * unit), Held(8 * many)]  # input, values, indices, rows last
    if rows == 1 or row >= _LARGE:
        steps += [Held(8 * row), *[radix_sort_bytes(row, unit, 8)] * min(rows, 2)]
    elif rows < 128:
        steps += [Held(8 * many), Held(8 * many), many * unit + radix_sort_bytes(many, unit, 8)]
        steps.append(radix_sort_bytes(many, 8, 0))
    else:
        steps += [Held(8 * many), many * (unit + 8)]
    return tuple(steps)


def _topk(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """A radix selection, then a sort of what was chosen: in place, or beside for more than 4096."""
    values, indices = out
    dim = argument(args, 2, -1)
    if values.dim() == 0 or values.shape[dim] <= _SMALL or not argument(args, 4, True):
        return ()
    beside = Held(tensor_bytes(indices)), Held(tensor_bytes(values))
    return (Made.REST, *beside, *sort_steps(values, dim), tensor_bytes(indices))


def _median(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The median of everything sorts everything."""
    flat = args[0].reshape(-1)
    return (Held(tensor_bytes(flat)), Held(8 * flat.numel()), *sort_steps(flat, 0), Made.REST)


def _randperm(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """Random keys beside 0, 1, 2, ..., sorted by key (ATen/native/cuda/Randperm.cu)."""
    many = out.numel()
    keys = 8 * many
    return Made.REST, Held(8 * many), Held(keys), Held(keys), radix_sort_bytes(many, 8, out.element_size())


def _multinomial(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """Without replacement: exponential noise over the weights, whose largest win (Distributions.cpp)."""
    replacement = argument(args, 2, False)
    if replacement and args[1] > 1:
        return (2 * tensor_bytes(args[0]),)  # normalised weights and their running sums
    return Held(tensor_bytes(args[0])), Made.REST


RULES: dict[Any, Rule] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort_stable,
    aten.argsort.default: _sort,
    aten.topk.default: _topk,
    aten.median.default: _median,
    aten.nanmedian.default: _median,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.multinomial.default: _multinomial,
}
