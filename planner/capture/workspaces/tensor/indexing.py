"""Give the workspaces of indexing, masking, `roll` and the gradients of embeddings."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import broadcast
from planner.capture.workspaces._rule import (
    accumulator_bytes,
    argument,
    ceil_div,
    contiguous_copies,
    tensor_bytes,
)
from planner.capture.workspaces.ops import (
    Args,
    Hold,
    KernelOp,
    Op,
    Ops,
    Outputs,
    Release,
    ReleaseBeneath,
    Rule,
)
from planner.capture.workspaces.tensor.sorting import radix_sort_bytes
from planner.program import Target

_FEW_INDICES = 3072  # up to here, one kernel runs without sorting (ATen/native/cuda/Embedding.cu)
_SCANNED_TOGETHER = 896  # elements of 8 bytes in a tile of CUB's scan, on 7.5, 8.6 and 9.0 with CUDA 13.0
_MASKS = (torch.bool, torch.uint8)
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD of EmbeddingBackwardKernel.cu


def _embedding_backward(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of an embedding.

    Many indices are sorted, and rows of equal indices are summed ten at a time into partial rows in float32.
    There are at most a tenth as many partial rows as indices, plus the number of distinct indices. Sources of
    2026 have
    another path without partial rows for few rows and many indices; torch 2.13 is assumed to lack it. Source:
    ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.
    """
    grad, indices, rows, _, by_frequency = args[:5]
    many = indices.numel()
    before = contiguous_copies(indices, grad)
    if many <= _FEW_INDICES and not by_frequency:
        return (*before, Outputs())
    return (*before, *_sort_and_sum(indices, rows, grad, target))


def _sort_and_sum(indices: Tensor, rows: int, grad: Tensor, target: Target) -> Ops:
    many, unit = indices.numel(), indices.element_size()
    segments = min(many, rows)
    partial = many // _ROWS_PER_THREAD + segments
    return (
        Hold(many * unit),  # the sorted indices
        Hold(many * unit),  # their positions before sorting
        Hold(many * unit),  # the numbers 0, 1, 2, ... during the sort
        radix_sort_bytes(many, unit, unit, target, bits_of(rows)),
        Release(1),
        Outputs(),
        Hold(segments * unit),  # starts of the groups of equal indices
        Hold(8),
        Hold(segments * unit),  # each group's number of partial rows, and their running sum
        Hold(segments * unit),
        Hold(8),
        Hold(partial * unit),
        Hold(partial * prod(grad.shape[-1:]) * accumulator_bytes(grad)),
    )


def _embedding_bag_backward(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of `embedding_bag`.

    Indices are sorted and rows of equal indices are summed, unless the mode is maximum
    (ATen/native/cuda/EmbeddingBag.cu).
    """
    grad, indices, rows, mode = args[0], args[1], args[6], args[8]
    summed = () if mode == 2 else _sort_and_sum(indices, rows, grad, target)
    return (*contiguous_copies(grad), *summed)


def _index_put(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `index_put`: () unless it accumulates, for which it sorts the indices.

    A mask is first replaced by the indices of its true elements, one tensor for each dimension
    (`expandTensors`, ATen/native/IndexingUtils.h). Source of the sort: `index_put_with_sort_kernel`,
    ATen/native/cuda/Indexing.cu.
    """
    x, indices, values, accumulate = args[0], args[1], args[2], argument(args, 3, False)
    given = [index for index in indices if index is not None]
    if not accumulate or not given:
        return ()
    covered = {d for start, index in _places(indices) for d in range(start, start + _width(index))}
    others = [x.shape[d] for d in range(x.dim()) if d not in covered]
    masks = [index for index in given if index.dtype in _MASKS]
    if masks:  # the number of true elements follows from the values
        many = values.numel() // max(prod(others), 1)
    else:
        many = prod(broadcast([index.shape for index in given]) or ())
    if many == 0:  # for example a mask without true elements
        return ()
    linear = 8 * many
    is_adjacent = max(covered) - min(covered) < len(covered)  # else indexed dimensions move to the front
    rest = prod(x.shape[max(covered) + 1 :] if is_adjacent else others)  # elements after indexed dimensions
    element = values.element_size()
    whole = many * prod(others) * element
    copy = () if values.is_contiguous() and tensor_bytes(values) == whole else (Hold(whole),)
    return (
        *(Hold(linear * mask.dim()) for mask in masks),
        Outputs(),
        *_linear_index(linear, len(given)),
        *copy,
        Hold(linear),  # the sorted indices
        Hold(linear),  # their positions before sorting
        Hold(linear),  # the numbers 0, 1, 2, ... during the sort
        radix_sort_bytes(many, 8, 8, target, bits_of((x.numel() - 1) // max(rest, 1))),
    )


def _linear_index(size: int, count: int) -> Iterator[KernelOp]:
    """Yield the ops that sum `count` indices of `size` bytes to linear indices.

    Each index is wrapped, multiplied by its stride, and added (computeLinearIndex,
    ATen/native/cuda/Indexing.cu).
    """
    for place in range(count):
        yield from (Hold(size), Hold(size), ReleaseBeneath(1))
        if place:
            yield Release(1)


def bits_of(key: int) -> int:
    """Return the number of bits of the largest key that is sorted (get_num_bits, ATen/cuda/cub.cuh)."""
    bits = 1
    while key >= 1 << bits:
        bits += 1
    return bits


def _places(indices: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
    """Yield each index that is not None with the first dimension that it indexes: (dimension, index)."""
    start = 0
    for index in indices:
        if index is not None:
            yield start, index
        start += 1 if index is None else _width(index)


def _width(index: Tensor) -> int:
    return index.dim() if index.dtype in _MASKS else 1


def true_elements_ops(mask: Tensor, target: Target, found: Op) -> Ops:
    """Return the ops that find a mask's true elements: a count, then a selection into the block `found`.

    `found` has a column of indices for each dimension (nonzero_cuda_out_impl, ATen/native/cuda/Nonzero.cu).
    The number of elements in CUB's blocks is from memory; both temporary storages are a few KiB per million
    elements.
    """
    many = mask.numel()
    if not many:
        return ()
    partial = min(ceil_div(many, 4096), 40 * target.sm_count)
    return (*contiguous_copies(mask), Hold(4), 4 * partial, found, 8 * (32 + ceil_div(many, 2048)))


def _index(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of indexing by tensors: aligned copies of indices, or the true elements of one mask.

    Source: expandTensors, ATen/native/IndexingUtils.h.
    """
    masks = [(start, index) for start, index in _places(args[1]) if index.dtype in _MASKS]
    if not masks:
        copies = tuple(_aligned([index for _, index in _places(args[1])]))
        return (*copies, Outputs()) if copies else ()
    if len(masks) != 1 or not out.numel():
        return ()
    ((start, mask),) = masks
    count = out.shape[start] if sum(index is not None for index in args[1]) == 1 else out.shape[0]
    return (*true_elements_ops(mask, target, Hold(8 * mask.dim() * count)), Outputs())


def _aligned(indices: Sequence[Tensor]) -> Iterator[KernelOp]:
    """Yield the copies of indices, expanded to a common shape, if their strides differ.

    Each expanded index that is not contiguous is copied (AdvancedIndex,
    ATen/native/TensorAdvancedIndexing.cpp).
    """
    shape = broadcast([tuple(index.shape) for index in indices]) or ()
    strides = [_expanded_strides(index, shape) for index in indices]
    if all(one == strides[0] for one in strides):
        return
    for index, held in zip(indices, strides, strict=True):
        if not _is_contiguous(shape, held):
            yield Hold(index.element_size() * prod(shape))


def _expanded_strides(index: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of an index expanded to a shape, starting with the last dimension.

    Source: ATen/ExpandUtils.cpp.
    """
    strides: list[int] = []
    for place in range(1, len(shape) + 1):
        if place <= index.dim():
            size, stride = index.shape[-place], index.stride()[-place]
        else:
            size, stride = 1, shape[1 - place] * strides[-1] if strides else 1
        strides.append(0 if size == 1 and shape[-place] != 1 else stride)
    return strides


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor of a shape is contiguous, given its strides from the last dimension on."""
    expected = 1
    for size, stride in zip(reversed(shape), strides, strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _masked_select(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `masked_select`, which indexes by the mask.

    Source: masked_select_out_cuda_impl, ATen/native/cuda/IndexKernel.cpp.
    """
    return (*true_elements_ops(args[1], target, Hold(8 * args[1].dim() * out.numel())), Outputs())


def _masked_scatter_backward(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of `masked_scatter`, which selects by the mask.

    All selected elements are assumed to have been scattered; torch pads the others (masked_scatter_backward,
    ATen/native/TensorAdvancedIndexing.cpp).
    """
    return _masked_select(args, out, target)


def _roll(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `roll`, which shifts one dimension after another, each into a new tensor.

    Source: roll_cuda and roll_common, ATen/native/cuda/TensorTransformations.cu and
    ATen/native/TensorTransformations.h.
    """
    x, dims = args[0], argument(args, 2, ())
    copy = contiguous_copies(x)
    if len(dims) < 2:
        return (*copy, Outputs())
    size = tensor_bytes(out)
    return (*copy, Hold(size), *[ReleaseBeneath(1)] * len(copy), *[Hold(size)] * (len(dims) - 2), Outputs())


def _masked_scatter(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `masked_scatter`, which counts for each element the true elements before it.

    A mask that must be expanded is copied. Source: masked_scatter__cuda and launch_masked_scatter_kernel,
    ATen/native/cuda/IndexKernel.cpp and IndexKernel.cu.
    """
    mask, source = args[1:3]
    many = out.numel()
    if not many:
        return ()
    copy = contiguous_copies(mask) if mask.shape == out.shape else (Hold(many),)
    return (Outputs(), Hold(8 * many), *copy, _scan_bytes(many), *contiguous_copies(source))


def _scan_bytes(many: int) -> int:
    """Return the bytes of temporary storage that CUB's scan of `many` elements takes.

    It has 16 bytes for each tile and for 32 more, aligned to 256, and an alignment for each of two parts
    (dispatch_scan.cuh and util_temporary_storage.cuh of CUB).
    """
    tiles = 16 * (ceil_div(many, _SCANNED_TOGETHER) + 32)
    return 256 * ceil_div(tiles, 256) + 256 + 255


RULES: dict[str, Rule] = {
    "index.Tensor _unsafe_index.Tensor": _index,
    "masked_select": _masked_select,
    "masked_scatter_backward": _masked_scatter_backward,
    "masked_scatter masked_scatter_": _masked_scatter,
    "roll": _roll,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _embedding_bag_backward,
    "index_put index_put_ _unsafe_index_put _index_put_impl_": _index_put,
}
