"""Workspace rules of reductions.

Blocks of threads exchange partial results through memory. If the outputs of a reduction do not fill the GPU,
each output's inputs are split over several blocks. This takes a buffer with one partial result per output and
block, and a semaphore per column of blocks. The number of blocks depends on the number of multiprocessors. If
rows are summed, the buffer's size counts the width of a block twice, so it has about 0.75 MiB for each
multiprocessor. Source: ATen/native/cuda/Reduce.cuh in the headers of torch 2.13.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import broadcast, contiguous
from planner.capture.workspaces._rule import (
    accumulator_bytes,
    argument,
    ceil_div,
    contiguous_copies,
    floor_power_of_2,
    released,
    tensor_bytes,
)
from planner.capture.workspaces.ops import Args, Hold, Ops, Outputs, Release, ReleaseBeneath, Rule
from planner.program import Target, threads_per_sm

_VECTOR = 4  # values that a thread loads at once (vt0 and input_vec_size of most kernels)
_MAX_THREADS = 512
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_HALVES = (torch.float16, torch.bfloat16)


class Dense(NamedTuple):
    """A contiguous tensor that a kernel makes, given by its shape."""

    shape: tuple[int, ...]

    def stride(self) -> tuple[int, ...]:
        return contiguous(self.shape)

    def dim(self) -> int:
        return len(self.shape)


class _Dim(NamedTuple):
    size: int
    stride: int  # stride of the input, in elements


def reduction(x: Tensor | Dense, dims: Sequence[int] | None, partial_bytes: int, target: Target) -> Ops:
    """Return the ops that hold a reduction's buffer and semaphores, or () if no output is split over blocks.

    `dims` are the reduced dimensions. An empty `dims` or None means all dimensions. `partial_bytes` is the
    size of one partial result: 4 for a sum of floats, 16 for mean and variance.
    """
    rank = x.dim()
    gone = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    shape, strides = x.shape, x.stride()
    reduced = _coalesce([_Dim(shape[d], strides[d]) for d in range(rank) if d in gone])
    remaining = _coalesce([_Dim(shape[d], strides[d]) for d in range(rank) if d not in gone])
    inputs, outputs = prod(d.size for d in reduced), prod(d.size for d in remaining)
    if inputs * min(outputs, 2**20) < _MAX_VALUES * _WARP or outputs == 0:
        return ()
    return _split(reduced, remaining, inputs, outputs, partial_bytes, target)


def _coalesce(dims: list[_Dim]) -> list[_Dim]:
    """Return the dimensions in order of stride, without sizes of 1 and with adjacent dimensions merged.

    Source: TensorIteratorBase.
    """
    joined: list[_Dim] = []
    for dim in sorted((d for d in dims if d.size > 1), key=lambda d: d.stride):
        if joined and joined[-1].size * joined[-1].stride == dim.stride:
            joined[-1] = _Dim(joined[-1].size * dim.size, joined[-1].stride)
        else:
            joined.append(dim)
    return joined


def _split(
    reduced: list[_Dim], remaining: list[_Dim], inputs: int, outputs: int, partial_bytes: int, target: Target
) -> Ops:
    """Return the ops that hold a reduction's buffer and semaphores, or () if no output is split over blocks.

    The steps follow `setReduceConfig` in its order.
    """
    # True if the fastest dimension is reduced.
    along = not remaining or (bool(reduced) and reduced[0].stride < remaining[0].stride)
    fastest = (reduced if along else remaining)[0].stride if reduced or remaining else 1
    width, height = (inputs, outputs) if along else (outputs, inputs)
    vector = 1
    if fastest == 1 and along and inputs >= 128 and len(reduced) == 1:
        width //= _VECTOR
    elif fastest == 1 and not along:
        vector = _output_vector(reduced, remaining)
        width //= vector
    block_x, block_y = _block(width, height, _MAX_THREADS // vector)
    step_input, step_output = (block_x, 1) if along else (1, block_x)
    across_warps = ceil_div(inputs, step_input) >= min(block_y * 16, _MAX_VALUES)
    if across_warps:
        step_input *= block_y
    else:
        step_output *= block_y
    values = ceil_div(inputs, step_input)
    grid = ceil_div(outputs // vector, step_output)
    limit = target.sm_count * (threads_per_sm(target.capability) // (block_x * block_y))
    if not across_warps or values < _MAX_VALUES or grid > limit:
        return ()
    blocks = max(min(ceil_div(limit, grid), ceil_div(values, _MIN_VALUES)), ceil_div(values, _MAX_VALUES))
    if blocks <= 1:
        return ()
    buffer = partial_bytes * outputs * blocks * (1 if along else block_x * vector)
    return Hold(buffer), Hold(4 * grid)


def _output_vector(reduced: list[_Dim], remaining: list[_Dim]) -> int:
    """Return the number of outputs per thread (`get_output_vec_size`).

    The storage is assumed to be aligned.
    """
    vector = _VECTOR
    for value in (remaining[0].size, *(d.stride for d in (*reduced, *remaining[1:]))):
        while value % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    x, y = floor_power_of_2(min(width, threads)), floor_power_of_2(min(height, threads))
    block_x = min(x, _WARP)
    block_y = min(y, threads // block_x)
    return min(x, threads // block_y), block_y


def _partial_bytes(x: Tensor) -> int:
    """Return the bytes of a sum's accumulator.

    The accumulator of int64 inputs is int64 (ATen/AccumulateType.h).
    """
    return 8 if x.dtype is torch.int64 else accumulator_bytes(x)


def _sum_over(position: int | None) -> Rule:
    """Return the rule of a sum, as in a norm, over the dimensions that the argument at `position` gives.

    If `position` is None, all dimensions are summed.
    """

    def rule(args: Args, out: Any, target: Target) -> Ops:
        dims = None if position is None else argument(args, position)
        return reduction(args[0], dims, _partial_bytes(args[0]), target)

    return rule


def _converted_sum(position: int | None) -> Rule:
    """Return the rule of a sum that first converts its input to the type of the result.

    The kernel itself converts half precision summed to float32 (ATen/native/ReduceOpsUtils.h,
    make_reduction_from_ty). `position` is as for `_sum_over`.
    """

    def rule(args: Args, out: Any, target: Target) -> Ops:
        x, dims = args[0], None if position is None else argument(args, position)
        dims = [dims] if isinstance(dims, int) else dims
        is_read = x.dtype is out.dtype or (x.dtype in _HALVES and out.dtype is torch.float32)
        copy = () if is_read else (Outputs(), Hold(x.numel() * out.element_size()))
        return (*copy, *reduction(x, dims, _partial_bytes(x if is_read else out), target))

    return rule


def _largest(position: int | None) -> Rule:
    """Return the rule of a reduction such as `amax`, whose partial results have the type of the result.

    `position` is as for `_sum_over`. Source: ReduceMaxValuesKernel.cu, ReduceLogicKernel.cu.
    """

    def rule(args: Args, out: Any, target: Target) -> Ops:
        dims = None if position is None else argument(args, position)
        return reduction(args[0], dims, out.element_size(), target)

    return rule


def _extremum_of_all(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `max` or `min` over a whole tensor: a contiguous copy if needed, and a reduction.

    The copy follows the output (ATen/native/ReduceAllOps.cpp).
    """
    x, copy = args[0], contiguous_copies(args[0])
    rest = reduction(Dense(tuple(x.shape)), None, out.element_size(), target)
    return (Outputs(), *copy, *rest) if copy else rest


def _count(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `count_nonzero`: a mask of nonzero elements, its conversion to int64, and a sum.

    Source: ATen/native/TensorAdvancedIndexing.cpp.
    """
    x, dims = args[0], argument(args, 1)
    mask = () if x.dtype is torch.bool else (Hold(x.numel()),)
    return (*mask, Outputs(), Hold(8 * x.numel()), *reduction(x, dims, 8, target))


def _extremum(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of a reduction to a value and its index. Partial results are pairs of 16 bytes."""
    dim = argument(args, 1)
    return reduction(args[0], None if dim is None else [dim], 16, target)


def _extrema(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `aminmax`, a reduction whose partial results are pairs of elements."""
    x, dim = args[0], argument(args, 1)
    if dim is None:
        return (Outputs(), *_pairs(x, target))
    return reduction(x, [dim], 2 * x.element_size(), target)


def _pairs(x: Tensor, target: Target) -> Ops:
    """Return the ops that copy a tensor if it is not contiguous and reduce it to its extrema.

    Source: ATen/native/cuda/ReduceMinValuesKernel.cu and ATen/native/TensorCompare.cpp.
    """
    pairs = reduction(Dense(tuple(x.shape)), None, 2 * x.element_size(), target)
    return (*contiguous_copies(x), *pairs)


def _variance(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of a variance, a reduction whose partial results are `WelfordData` (SharedReduceOps.h).

    A `WelfordData` has mean, sum of squares, count, and the count as a float.
    """
    return reduction(args[0], argument(args, 1), 32 if args[0].dtype is torch.float64 else 16, target)


def _logsumexp(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `logsumexp`: maxima, a mask of infinite maxima, exp(x - maxima), and the output.

    Source: ATen/native/ReduceOps.cpp.
    """
    maxima = Hold(tensor_bytes(out))
    return maxima, maxima, out.numel(), Release(1), Hold(tensor_bytes(args[0])), Outputs()


def _distance(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `dist`: the difference, the output, and the reduction of its norm (Distance.cpp)."""
    difference = Dense(tuple(broadcast([args[0].shape, args[1].shape]) or ()))
    sums = reduction(difference, None, _partial_bytes(out), target)
    return (Hold(prod(difference.shape) * out.element_size()), Outputs(), *sums)


def _multivariate_log_gamma(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `mvlgamma`: the offsets, each element plus each offset, and their sums.

    Source: ATen/native/UnaryOps.cpp.
    """
    unit, order = out.element_size(), args[1]
    sums = reduction(Dense((*out.shape, order)), [-1], _partial_bytes(out), target)
    return (Hold(order * unit), Hold(order * tensor_bytes(out)), ReleaseBeneath(1), Outputs(), *sums)


def _is_in(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `isin` if few elements are looked for: comparisons of all pairs, and if any is true.

    The operators that sort if many elements are looked for are not planned. Source:
    ATen/native/TensorCompare.cpp.
    """
    many, few = out.numel(), args[1].numel()
    if few >= 10 * many**0.145:
        return ()
    return (Outputs(), Hold(many * few), Hold(many), *reduction(Dense((many, few)), [1], 1, target))


def extent(x: Tensor, target: Target) -> Ops:
    """Return the ops that hold a tensor's least and greatest element after their reduction."""
    one, pairs = Hold(x.element_size()), _pairs(x, target)
    return (one, one, *pairs, *released(pairs))


def _count_of_each(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `bincount`: the least and the greatest number, then the output (SummaryOps.cu)."""
    return (*extent(args[0], target), Outputs()) if args[0].numel() else ()


def _histogram(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `histc`: the output, then the least and the greatest element if no range is given.

    Source: ATen/native/cuda/SummaryOps.cu.
    """
    is_given = argument(args, 2, 0) != argument(args, 3, 0)
    return () if is_given or not args[0].numel() else (Outputs(), *extent(args[0], target))


def _distances(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `cdist`: copies of expanded or other non-contiguous sides, and the output."""
    return (*_copied_sides(args[0], args[1], out), Outputs())


def _copied_sides(one: Tensor, other: Tensor, distances: Tensor) -> Ops:
    """Return a `Hold` op for each side of `distances` that must be expanded or is not contiguous."""
    batch = distances.shape[:-2]
    return tuple(
        Hold(prod((*batch, *side.shape[-2:])) * side.element_size())
        for side in (one, other)
        if side.shape[:-2] != batch or not side.is_contiguous()
    )


def _gradient_of_distances(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of `cdist`: copies, gradients for all pairs of rows, and their sum.

    Source: ATen/native/Distance.cpp and cuda/DistanceKernel.cu.
    """
    grad, one, other, p, distances = args
    samples, (rows, width) = prod(distances.shape[:-2]), one.shape[-2:]
    copied = (*_copied_sides(one, other, distances), *contiguous_copies(distances, grad))
    if p == 0 or distances.numel() == 0:
        return (*copied, Outputs())
    return (*copied, Outputs(), *_sum_of_pairs((samples, other.shape[-2], rows, width), one, target))


def _gradient_of_own_distances(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of `pdist`: gradients for all pairs of rows, and their sum.

    Source: ATen/native/cuda/DistanceKernel.cu.
    """
    _, x, p, distances = args
    if p == 0 or distances.numel() == 0:
        return ()
    return (Outputs(), *_sum_of_pairs((1, x.shape[0] - 1, *x.shape), x, target))


def _sum_of_pairs(shape: tuple[int, int, int, int], x: Tensor, target: Target) -> Ops:
    """Return the ops that hold gradients for pairs of rows of `x`, then of their sum over dimension 1."""
    sums = reduction(Dense(shape), [1], _partial_bytes(x), target)
    return (Hold(prod(shape) * x.element_size()), *sums)


RULES: dict[str, Rule] = {
    "_cdist_backward": _gradient_of_distances,
    "_pdist_backward": _gradient_of_own_distances,
    "sum.dim_IntList nansum prod.dim_int mean.dim": _converted_sum(1),
    "sum prod mean": _converted_sum(None),
    "amax amin any.dims all.dims": _largest(1),
    "any all": _largest(None),
    "max min": _extremum_of_all,
    "count_nonzero count_nonzero.dim_IntList": _count,
    "max.dim min.dim argmax argmin any.dim all.dim": _extremum,
    "aminmax": _extrema,
    "bincount": _count_of_each,
    "histc": _histogram,
    "isin.Tensor_Tensor": _is_in,
    "dist": _distance,
    "mvlgamma": _multivariate_log_gamma,
    "_cdist_forward": _distances,
    "var.correction std.correction var_mean.correction std_mean.correction": _variance,
    "linalg_vector_norm norm.ScalarOpt_dim": _sum_over(2),
    "logsumexp": _logsumexp,
}
