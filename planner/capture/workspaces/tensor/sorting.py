"""Workspaces of sorting and of operators that sort.

ATen/native/cuda/Sort.cpp, Sort.cu, SortStable.cu, TensorTopK.cpp and Sorting.cpp; the temporary storage of
CUB's radix sort.
"""

from functools import partial
from typing import Any

from torch import Tensor

from planner.capture.workspaces._rule import argument, ceil_div, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Op, Ops, Outputs, Rule
from planner.program import Target

_SMALL = 4096  # up to here, rows are sorted in place (should_use_small_sort)
_LARGE = 1_000_000  # from here on, rows are sorted one after the other


def radix_sort_bytes(many: int, key_bytes: int, value_bytes: int) -> int:
    """Return about the temporary storage of CUB's radix sort of so many pairs.

    It is the other halves of the double buffers, and 1 KiB of digit counts for each block of some 7,680 pairs
    (cub/device/dispatch/dispatch_radix_sort.cuh, onesweep; the block's size is from memory and differs by
    GPU and type).
    """
    return many * (key_bytes + value_bytes) + 1024 * (8 + ceil_div(many, 7680))


def _sort(position: int, args: Args, out: Any, target: Target) -> Ops:
    """Sort along the dimension that stands at this position of the arguments."""
    return sort_ops(args[0], argument(args, position, -1))


def sort_ops(x: Tensor, dim: int) -> Ops:
    """Return the ops of a sort along this dimension, after values and indices are made."""
    if x.dim() == 0 or x.numel() == 0:
        return ()
    row = x.shape[dim]
    if row <= _SMALL:
        return (8 * row,)  # the numbers 0, 1, 2, ...
    many, unit = x.numel(), x.element_size()
    rows = many // row
    ops: list[Op] = [Outputs()]
    if x.stride(dim) != 1:
        ops += [Hold(many * unit), Hold(many * unit), Hold(8 * many)]  # input, values, indices, rows last
    if rows == 1 or row >= _LARGE:
        ops += [Hold(8 * row), *[radix_sort_bytes(row, unit, 8)] * min(rows, 2)]
    elif rows < 128:
        ops += [Hold(8 * many), Hold(8 * many), many * unit + radix_sort_bytes(many, unit, 8)]
        ops.append(radix_sort_bytes(many, 8, 0))
    else:
        ops += [Hold(8 * many), many * (unit + 8)]
    return tuple(ops)


def _topk(args: Args, out: Any, target: Target) -> Ops:
    """Select by radix, then sort the selection: in place, or with copies for more than 4096."""
    values, indices = out
    dim = argument(args, 2, -1)
    if values.dim() == 0 or values.shape[dim] <= _SMALL or not argument(args, 4, True):
        return ()
    beside = Hold(tensor_bytes(indices)), Hold(tensor_bytes(values))
    return (Outputs(), *beside, *sort_ops(values, dim), tensor_bytes(indices))


def _median(args: Args, out: Any, target: Target) -> Ops:
    """Sort all elements."""
    flat = args[0].reshape(-1)
    return (Hold(tensor_bytes(flat)), Hold(8 * flat.numel()), *sort_ops(flat, 0), Outputs())


def _randperm(args: Args, out: Tensor, target: Target) -> Ops:
    """Sort 0, 1, 2, ... by random keys (ATen/native/cuda/Randperm.cu)."""
    many = out.numel()
    keys = 8 * many
    return Outputs(), Hold(8 * many), Hold(keys), Hold(keys), radix_sort_bytes(many, 8, out.element_size())


def _multinomial(args: Args, out: Tensor, target: Target) -> Ops:
    """Hold exponential noise over the weights where samples are not replaced (Distributions.cpp)."""
    replacement = argument(args, 2, False)
    if replacement and args[1] > 1:
        return (2 * tensor_bytes(args[0]),)  # normalised weights and their running sums
    return Hold(tensor_bytes(args[0])), Outputs()


RULES: dict[str, Rule] = {
    "sort argsort": partial(_sort, 1),
    "sort.stable": partial(_sort, 2),
    "topk": _topk,
    "median nanmedian": _median,
    "randperm randperm.generator": _randperm,
    "multinomial": _multinomial,
}
