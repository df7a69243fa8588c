"""Workspace rules of sorting and of operators that sort.

Sources: ATen/native/cuda/Sort.cpp, Sort.cu, SortStable.cu, TensorTopK.cpp, TensorTopK.cu and Sorting.cpp;
for the temporary storage of CUB, CUDA 13.0 (cub/device/dispatch: dispatch_radix_sort.cuh,
dispatch_scan_by_key.cuh, tuning/tuning_radix_sort.cuh, tuning/tuning_scan_by_key.cuh).
"""

from functools import partial
from typing import Any

from torch import Tensor

from planner.capture.meta_kernels.strides import empty, is_dense
from planner.capture.workspaces._rule import (
    accumulator_bytes,
    argument,
    ceil_div,
    contiguous_copies,
    released,
    tensor_bytes,
)
from planner.capture.workspaces.ops import (
    Args,
    Hold,
    Op,
    Ops,
    Outputs,
    Release,
    ReleaseBeneath,
    Rule,
    kind_and_size,
)
from planner.capture.workspaces.tensor.reductions import extent, reduction
from planner.program import OpKind, Target, TorchVersion, threads_per_sm

_SMALL = 4096  # rows of at most this length are sorted in place (should_use_small_sort)
_LARGE = 1_000_000  # rows of at least this length are sorted one after another
_DIGITS = 256  # values of a digit of eight bits
_ALIGNED = 256  # bytes
_ONE_BLOCK, _ONE_BLOCK_ITEMS = 256, 19  # threads, and words of four bytes per thread
_SHARED_BYTES = 48 * 1024
_SCAN_TILE = 512 * 11  # counts of eight bytes that a block of threads sums
# `topk` by several blocks of threads for each row: rows up to a number, and the least length for so many rows
_LEAST_LENGTHS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
_LEAST_LENGTH_OF_MORE_ROWS = 400
_SELECT_BLOCK = 256  # threads
_SELECT_BLOCKS_PER_SM = 6  # of 40 registers for each thread
_INDEXED_BYTES = 16  # of a value and its index, a partial result of `argmax`
_SUMS_OF_DIGITS_SINCE: TorchVersion = (2, 10)  # pytorch/pytorch#164459


def radix_sort_bytes(many: int, key_bytes: int, value_bytes: int, target: Target, bits: int = 0) -> int:
    """Return the bytes of CUB's temporary storage for a radix sort of `many` pairs of key and value.

    The sort uses the low `bits` bits of keys, or all bits if `bits` is 0. Few pairs are sorted by a single
    block. Otherwise the storage holds digits for each pass of eight bits, digits for each block of pairs, and
    with several passes the other halves of the double buffers. Before compute capability 9.0, keys of less
    than four bytes are sorted in passes of fewer bits, and digits are counted for five times as many blocks
    as the threads of all SMs make up: an upper bound, since registers and shared memory allow fewer.
    """
    if many <= _ONE_BLOCK * (_ONE_BLOCK_ITEMS * 4 // max(4, key_bytes, value_bytes)):
        return 1
    if key_bytes < 4 and target.capability < (9, 0):
        digits, threads = (128, 256) if key_bytes > 1 else (32, 128)
        resident = target.sm_count * (threads_per_sm(target.capability) // threads)
        counts = 5 * resident * digits + _SCAN_TILE
        return _storage_bytes(8 * counts, many * key_bytes, many * value_bytes)
    passes = ceil_div(bits or 8 * key_bytes, 8)
    blocks = ceil_div(many, _block_pairs(key_bytes, value_bytes, target.capability))
    buffers = (many * key_bytes, many * value_bytes) if passes > 1 else ()
    parts = (passes * _DIGITS * 8, blocks * _DIGITS * 4, *buffers, passes * 4)
    return _storage_bytes(*parts)


def _storage_bytes(*parts: int) -> int:
    """Return the bytes of CUB's temporary storage for parts of these sizes, each of which is aligned."""
    return sum(ceil_div(part, _ALIGNED) * _ALIGNED for part in parts) + _ALIGNED - 1


def _block_pairs(key_bytes: int, value_bytes: int, capability: tuple[int, int]) -> int:
    """Return the number of pairs that a block of threads sorts in a pass. Shared memory bounds the number."""
    threads, words = 384, 21  # words of four bytes for each thread
    if capability >= (9, 0):
        of_key = {4: 29 if value_bytes == 8 else 17 if value_bytes else 18, 8: 24 if value_bytes == 8 else 30}
        threads, words = {1: (384, 18), 2: (512, 23)}.get(key_bytes, (threads, of_key.get(key_bytes, words)))
    elif capability < (8, 0):
        threads, words = 256, 46 if key_bytes == value_bytes == 4 else 23
    elif key_bytes == 4 and value_bytes:
        words = 17
    unit = max(4, key_bytes, value_bytes)
    items = max(1, words * 4 // unit)
    return min(threads, ceil_div(_SHARED_BYTES // (unit * items), 32) * 32) * items


def _sort(position: int, args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of a sort along the dimension that the argument at `position` gives."""
    return sort_ops(args[0], argument(args, position, -1), target, out[0])


def sort_ops(x: Tensor, dim: int, target: Target, values: Tensor | None = None) -> Ops:
    """Return the ops of a sort of `x` along a dimension, or () if `x` is empty or a scalar.

    Rows longer than `_SMALL` take temporary storage after the outputs, and copies if `x` is not dense with
    one row after another. The sorted `values` have the strides of `x` if they are None.
    """
    if x.dim() == 0 or x.numel() == 0:
        return ()
    row = x.shape[dim]
    if row <= _SMALL:
        return (8 * row,)  # the numbers 0, 1, 2, ...
    many, unit = x.numel(), x.element_size()
    rows = many // row
    ops: list[Op] = [Outputs()]
    if x.stride(dim) != 1 or not is_dense(x.shape, x.stride()):
        ops.append(Hold(many * unit))
    if (x if values is None else values).stride(dim) != 1:
        ops += [Hold(many * unit), Hold(8 * many)]  # values and indices, rows last
    if rows == 1 or row >= _LARGE:
        ops += [Hold(8 * row), *[radix_sort_bytes(row, unit, 8, target)] * min(rows, 2)]
    elif rows < 128:
        ops += [Hold(8 * many), Hold(8 * many)]
        ops += [Hold(many * unit), radix_sort_bytes(many, unit, 8, target), Release(1)]
        ops.append(radix_sort_bytes(many, 8, 0, target, bits=7))  # of the rows' numbers
    else:
        ops += [Hold(8 * many), _storage_bytes(many * unit, many * 8)]
    return tuple(ops)


def _topk(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `topk`: a contiguous copy if needed, the selection, and a sort of many values."""
    values, indices = out
    x, dim = args[0], argument(args, 2, -1)
    if values.numel() == 0:
        return ()
    ops: Ops = contiguous_copies(x)
    if x.dim() and _takes_blocks(x.numel() // x.shape[dim], x.shape[dim]):
        ops += _selection(x, dim, target)
    ops = (Outputs(), *ops, Release(held_blocks(ops)))
    if not x.dim() or values.shape[dim] <= _SMALL or not argument(args, 4, True):
        return ops
    sort = sort_ops(values, dim, target)
    held = Hold(tensor_bytes(indices)), Hold(tensor_bytes(values))
    return (*ops, *held, *sort, Release(held_blocks(sort)), tensor_bytes(indices))


def held_blocks(ops: Ops) -> int:
    """Return the number of blocks that ops have held and not released."""
    kinds = [kind_and_size(op) for op in ops]
    released = sum(number for kind, number in kinds if kind is OpKind.RELEASE)
    return sum(kind is OpKind.HOLD for kind, _ in kinds) - int(released)


def _takes_blocks(rows: int, row: int) -> bool:
    """Return whether `topk` selects from a row by several blocks of threads (`should_use_multiblock`)."""
    least = (length for most, length in _LEAST_LENGTHS if rows <= most)
    return row >= next(least, _LEAST_LENGTH_OF_MORE_ROWS)


def _selection(x: Tensor, dim: int, target: Target) -> Ops:
    """Return the ops of `topk`'s selection by several blocks of threads, which count the digits of values.

    They hold the last selected value of each row, its rank and its digits so far, the counts of digits of
    each block, their sums over each row, and twice the number of values that each block selects.
    """
    row, unit = x.shape[dim], x.element_size()
    rows = x.numel() // row
    at_once = target.sm_count * _SELECT_BLOCKS_PER_SM * _SELECT_BLOCK
    items = max(4, min(ceil_div(x.numel(), at_once), 64))
    blocks = rows * ceil_div(row, items * _SELECT_BLOCK)
    sums = () if target.torch < _SUMS_OF_DIGITS_SINCE else (Hold(4 * _DIGITS * rows),)
    scan = scan_by_key_bytes(blocks, 4, target.capability)
    return (
        Hold(rows * unit), Hold(8 * rows), Hold(2 * max(4, unit) * rows), Hold(2 * _DIGITS * blocks), *sums,
        Hold(4 * blocks), Hold(4 * blocks), scan, scan,
    )  # fmt: skip


def scan_by_key_bytes(many: int, unit: int, capability: tuple[int, int]) -> int:
    """Return the bytes of CUB's temporary storage to scan values by key, both of `unit` bytes: 4 or 8."""
    is_long = unit == 8
    if capability >= (10, 0):
        tile = 256 * 23 if is_long else 224 * 20
    elif capability >= (9, 0):
        tile = 224 * 11 if is_long else 288 * 14
    elif capability == (8, 0):
        tile = 224 * 10 if is_long else 256 * 15
    else:
        tile = 256 * 9
    tiles = ceil_div(many, tile)
    return _storage_bytes(16 * (32 + tiles), unit * (tiles + 1))


def _median(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `median` over a whole tensor: sorted values and indices, a sort, and the output."""
    flat = args[0].reshape(-1)
    return (Hold(tensor_bytes(flat)), Hold(8 * flat.numel()), *sort_ops(flat, 0, target), Outputs())


def _randperm(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `randperm`, which sorts numbers by random keys (cuda/Randperm.cu)."""
    many = out.numel()
    keys = 8 * many
    sort_bytes = radix_sort_bytes(many, 8, out.element_size(), target)
    return Outputs(), Hold(8 * many), Hold(keys), Hold(keys), sort_bytes


def _multinomial(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `multinomial`: the output, then running sums of weights, or noise.

    For several draws with replacement, weights are copied, normalised and summed. Otherwise they are checked,
    and the largest values of noise that they divide are selected. Source: ATen/native/Distributions.cpp and
    cuda/MultinomialKernel.cu.
    """
    weights, draws = args[:2]
    each = Hold(tensor_bytes(weights))
    if argument(args, 2, False) and draws > 1:
        return (Outputs(), each, each, each)
    noise = empty(weights.shape, weights.dtype)
    if draws == 1:
        selection: Ops = reduction(noise, [-1], _INDEXED_BYTES, target)
    else:
        values = empty(out.shape, weights.dtype)
        selected = _topk((noise, draws), (values, out), target)
        selection = (Hold(tensor_bytes(values)), *(op for op in selected if op != Outputs()))
    return (Outputs(), *_checked_weights(weights, target), each, *selection)


def _checked_weights(weights: Tensor, target: Target) -> Ops:
    """Return the ops that look for weights that are infinite or negative, and for rows without weight."""
    rows = weights.numel() // weights.shape[-1]
    sums = reduction(weights, [-1], accumulator_bytes(weights), target)
    both = ReleaseBeneath(1), ReleaseBeneath(1)  # operands of a comparison that is held
    without = (Hold(rows), Hold(1), *both) if weights.dim() > 1 else (Hold(1), ReleaseBeneath(1))
    return (
        *extent(weights, target), Hold(1), Hold(1), Hold(1), *both,
        Hold(rows * weights.element_size()), *sums, *released(sums), *without, 1,
    )  # fmt: skip


RULES: dict[str, Rule] = {
    "sort": partial(_sort, 1),
    "sort.stable": partial(_sort, 2),
    "topk": _topk,
    "median nanmedian": _median,
    "randperm randperm.generator": _randperm,
    "multinomial": _multinomial,
}
