"""Workspace rules of indexing, masking, `roll` and the gradients of embeddings."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from planner.capture.arguments import as_cpu_tensor, is_on_cpu
from planner.capture.meta_kernels.strides import broadcast, contiguous, empty
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
    KernelOp,
    Op,
    Ops,
    Outputs,
    Release,
    ReleaseBeneath,
    Rule,
)
from planner.capture.workspaces.tensor.reductions import extent
from planner.capture.workspaces.tensor.sorting import radix_sort_bytes, scan_by_key_bytes
from planner.program import Target, TorchVersion

_FEW_INDICES = 3072  # up to here, one kernel runs without sorting (ATen/native/cuda/Embedding.cu)
_SCANNED_TOGETHER = 896  # elements of 8 bytes in a tile of CUB's scan, on 7.5, 8.6 and 9.0 with CUDA 13.0
_MASKS = (torch.bool, torch.uint8)
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD of EmbeddingBackwardKernel.cu
_ADDED_SINCE: TorchVersion = (2, 11)  # pytorch/pytorch#172454


def _embedding(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `embedding`: a copy of indices that no view makes one-dimensional, and the output.

    Source: ATen/native/Embedding.cpp.
    """
    indices = args[1]
    dims = [(size, step) for size, step in zip(indices.shape, indices.stride(), strict=True) if size != 1]
    is_flat = indices.numel() == 0 or all(
        step == size * beneath for (_, step), (size, beneath) in pairwise(dims)
    )
    return () if is_flat else (Hold(tensor_bytes(indices)), Outputs())


def _embedding_backward(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of an embedding's gradient: copies and, for many indices, a sort and sums of equal ones.

    Source: ATen/native/cuda/Embedding.cu.
    """
    grad, indices, rows, _, by_frequency = args[:5]
    before = contiguous_copies(indices, grad)
    if indices.numel() <= _FEW_INDICES and not by_frequency:
        return (*before, Outputs())
    may_add = target.torch >= _ADDED_SINCE and not torch.are_deterministic_algorithms_enabled()
    return (*before, *_sort_and_sum(indices, rows, grad, target, by_frequency, may_add))


def _sort_and_sum(
    indices: Tensor, rows: int, grad: Tensor, target: Target, by_frequency: bool, may_add: bool
) -> Ops:
    """Return the ops that sort indices and sum the rows of equal ones, ten at a time, into partial rows.

    Scaled by frequency, sums take counts of indices, which are scanned forwards and backwards. There are at
    most a tenth as many partial rows as indices, plus the number of distinct indices. They are held until
    they are summed. If they may be added to the gradient, and sums would occupy few SMs, they are added as
    they are made, and only the index of each is held. Source: ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    many, unit, width = indices.numel(), indices.element_size(), grad.shape[-1]
    segments = min(many, rows)
    partial = many // _ROWS_PER_THREAD + segments
    scan = scan_by_key_bytes(many, unit, target.capability)
    counts = (Hold(many * unit), scan, scan) if by_frequency else ()
    threads = 32 * ceil_div(width, 32)
    blocks = ceil_div(segments * threads, min(threads, 1024))
    sums: Ops = (Hold(partial * width * accumulator_bytes(grad)),)
    if may_add and blocks < 4 * target.sm_count and partial > 4 * blocks:
        in_float32 = (Hold(rows * width * 4),) if grad.element_size() == 2 else ()
        sums = (Hold(partial * unit), *in_float32)
    return (
        Hold(many * unit),  # the sorted indices
        Hold(many * unit),  # their positions before sorting
        Hold(many * unit),  # the numbers 0, 1, 2, ... during the sort
        radix_sort_bytes(many, unit, unit, target, bits_of(rows)),
        Release(1),
        *counts,
        Outputs(),
        Hold(many * unit),  # starts of the groups of equal indices
        Hold(8),
        Hold(many * unit),  # an index for each group, which is not read
        _unique_bytes(many, unit, target.capability),
        Release(1),
        Hold(segments * unit),  # each group's number of partial rows, and their running sum, by a small scan
        Hold(segments * unit),
        Hold(8),
        Hold(partial * unit),
        *sums,
    )


def _unique_bytes(many: int, unit: int, capability: tuple[int, int]) -> int:
    """Return the bytes of CUB's temporary storage to find the first of equal indices of `unit` bytes.

    A tile has 16 bytes (dispatch_unique_by_key.cuh and tuning/tuning_unique_by_key.cuh, CUDA 13.0).
    """
    if capability >= (9, 0):
        tile = 448 * 11 if unit == 8 else 512 * 14
    elif capability == (8, 0):
        tile = 192 * 7 if unit == 8 else 256 * 11
    else:
        tile = 64 * 5 if unit == 8 else 64 * 11
    return _tiles_bytes(ceil_div(many, tile))


def _embedding_bag_backward(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of `embedding_bag`: a sort and partial rows, unless mode is maximum.

    Rows of equal indices are summed (ATen/native/cuda/EmbeddingBag.cu).
    """
    grad, indices, rows, by_frequency, mode = args[0], args[1], *args[6:9]
    summed = () if mode == 2 else _sort_and_sum(indices, rows, grad, target, by_frequency, may_add=False)
    return (*contiguous_copies(grad), *summed)


def _index_put(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `index_put`: moved indices or, if it accumulates, a sort of a linear index.

    A mask is first replaced by the indices of its true elements, one tensor for each dimension
    (`expandTensors`, ATen/native/IndexingUtils.h). Source of the sort: `index_put_with_sort_kernel`,
    ATen/native/cuda/Indexing.cu. Indices are checked, except for the gradient of indexing.
    """
    x, values, accumulate = args[0], args[2], argument(args, 3, False)
    covered = {d for start, index in _places(args[1]) for d in range(start, start + _width(index))}
    if not covered:
        return ()
    others = [x.shape[d] for d in range(x.dim()) if d not in covered]
    masks = [index for _, index in _places(args[1]) if index.dtype in _MASKS]
    if masks and values.numel() == 1 and not accumulate:
        if not any(map(is_on_cpu, masks)):
            return ()  # filled (canDispatchToMaskedFill)
        many = max(mask.numel() for mask in masks)  # an upper bound, since a mask on the CPU is not read
    elif masks:  # the number of true elements follows from the values
        many = values.numel() // max(prod(others), 1)
    else:
        many = prod(broadcast([index.shape for _, index in _places(args[1])]) or ())
    if many == 0:  # for example a mask without true elements
        return ()
    indices = [*_without_cpu_masks(args[1], many)]
    if not accumulate:
        return () if any(index.dtype in _MASKS for index in indices) else tuple(_moved(indices))
    linear = 8 * many
    is_adjacent = max(covered) - min(covered) < len(covered)  # if not, indexed dimensions move to the front
    rest = prod(x.shape[max(covered) + 1 :] if is_adjacent else others)  # elements after indexed dimensions
    element = values.element_size()
    whole = many * prod(others) * element
    copy = () if values.is_contiguous() and tensor_bytes(values) == whole else (Hold(whole),)
    return (
        *(Hold(linear * index.dim()) for index in indices if index.dtype in _MASKS),
        Outputs(),
        *_linear_index(linear, indices, None if argument(args, 4, False) else target),
        *copy,
        Hold(linear),  # the sorted indices
        Hold(linear),  # their positions before sorting
        Hold(linear),  # the numbers 0, 1, 2, ... during the sort
        radix_sort_bytes(many, 8, 8, target, bits_of((x.numel() - 1) // max(rest, 1))),
    )


def _linear_index(size: int, indices: Sequence[Tensor], checked_on: Target | None) -> Iterator[Op]:
    """Yield the ops that combine indices into one linear index.

    An index on the GPU takes `size` bytes. Each index is wrapped, multiplied by its stride, and added. CPU
    indices are moved to the GPU after the product, and int32 indices of the GPU are converted to int64 at
    first. Before it is wrapped, an index on the GPU is expanded to the common shape and compared with the
    range of its dimension, unless `checked_on` is None (computeLinearIndex, ATen/native/cuda/Indexing.cu).
    """
    converted = [index for index in indices if index.dtype is torch.int32 and not is_on_cpu(index)]
    yield from (Hold(size) for _ in converted)
    each = [index for index in indices for _ in range(_width(index))]
    shape = broadcast([(size // 8,) if one.dtype in _MASKS else one.shape for one in indices]) or ()
    for place, index in enumerate(each):
        if is_on_cpu(index):
            yield Hold(size)
        else:
            if checked_on is not None:
                is_read = index.dtype is torch.int64
                extrema = extent(index.expand(shape) if is_read else empty(shape, torch.int64), checked_on)
                yield from (*extrema, 1, 1, Release(2))
            yield from (Hold(size), Hold(size), ReleaseBeneath(1))
        if place:
            yield Release(1)
    yield from (ReleaseBeneath(1) for _ in converted)


def bits_of(key: int) -> int:
    """Return the number of bits that hold `key`, the largest key of a sort, and at least 1.

    Source: get_num_bits, ATen/cuda/cub.cuh.
    """
    bits = 1
    while key >= 1 << bits:
        bits += 1
    return bits


def _places(indices: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
    """Yield each index with the first dimension that it indexes. Indices that are None are skipped."""
    start = 0
    for index in indices:
        if index is not None:
            yield start, index
        start += 1 if index is None else _width(index)


def _width(index: Tensor) -> int:
    return index.dim() if index.dtype in _MASKS else 1


def true_elements_ops(mask: Tensor, target: Target, found: Op) -> Ops:
    """Return the ops that count a mask's true elements, then select their indices into the block `found`.

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
    """Return the ops of indexing by tensors: copies of indices, or a search for a GPU mask's true elements.

    Source: expandTensors, ATen/native/IndexingUtils.h.
    """
    places = [*_places(args[1])]
    masks = [(start, index) for start, index in places if index.dtype in _MASKS]
    count = 0
    if masks:
        if len(masks) != 1 or not out.numel():
            return ()
        ((start, mask),) = masks
        count = out.shape[start] if len(places) == 1 else out.shape[0]
        if not is_on_cpu(mask):
            return (*true_elements_ops(mask, target, Hold(8 * mask.dim() * count)), Outputs())
    copies = tuple(_moved([*_without_cpu_masks(args[1], count)]))
    return (*copies, Outputs()) if copies else ()


def _without_cpu_masks(indices: Sequence[Tensor | None], count: int) -> Iterator[Tensor]:
    """Yield the indices that are not None, with each CPU mask replaced by indices of `count` elements."""
    for _, index in _places(indices):
        if index.dtype in _MASKS and is_on_cpu(index):
            for _ in range(index.dim()):
                yield as_cpu_tensor(torch.empty(count, dtype=torch.int64, device="meta"))
        else:
            yield index


def _moved(indices: Sequence[Tensor]) -> Iterator[KernelOp]:
    """Yield the ops that convert indices to int64 tensors on the GPU with equal strides.

    CPU indices are moved, int32 indices are expanded to a common shape and converted, and if strides
    differ, each expanded index that is not contiguous is copied (make_info and AdvancedIndex,
    ATen/native/TensorAdvancedIndexing.cpp). The block of a copied index is freed.
    """
    shape = broadcast([tuple(index.shape) for index in indices]) or ()
    strides = [_expanded_strides(index, shape) for index in indices]
    size = 8 * prod(shape)
    held = [at for at, index in enumerate(indices) if is_on_cpu(index)]  # the index that each block holds
    yield from (Hold(indices[at].element_size() * indices[at].numel()) for at in held)
    for at, index in enumerate(indices):
        if index.dtype is torch.int32:
            yield Hold(size)
            held.append(-1)
            yield from _replaced(held, at)
            held[-1] = at
            strides[at] = [*reversed(contiguous(shape))]
    if all(one == strides[0] for one in strides):
        return
    copied = [at for at, one in enumerate(strides) if not _is_contiguous(shape, one)]
    yield from (Hold(size) for _ in copied)
    held += [-1] * len(copied)
    for at in copied:
        yield from _replaced(held, at)


def _replaced(held: list[int], at: int) -> Iterator[KernelOp]:
    """Yield the op that frees the block of index `at`, if the index has a block.

    `held` lists the index that each held block stores, or -1, in the order of allocation. The freed block is
    removed from `held`.
    """
    if at in held:
        place = held.index(at)
        yield ReleaseBeneath(len(held) - 1 - place)
        del held[place]


def _expanded_strides(index: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of an index expanded to a shape, last dimension first.

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
    """Return whether `strides`, listed last dimension first, are the contiguous strides of `shape`."""
    expected = 1
    for size, stride in zip(reversed(shape), strides, strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _scattered_mean(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `scatter_reduce` to a mean: ones for the source, their sums, and a mask of zero sums.

    Other reductions need no workspace. Source: ATen/native/TensorAdvancedIndexing.cpp.
    """
    if args[4] != "mean":
        return ()
    return Hold(tensor_bytes(args[3])), Hold(tensor_bytes(out)), out.numel()


def _indexed_mean(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `index_reduce` to a mean: sums of ones, the ones, and a mask of zero sums.

    Other reductions need no workspace. Source: ATen/native/cuda/Indexing.cu.
    """
    return (Hold(tensor_bytes(out)), tensor_bytes(args[3]), out.numel()) if args[4] == "mean" else ()


def _masked_select(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `masked_select`: a search for the mask's true elements, then the output.

    `masked_scatter_backward` is taken to have the same ops. All selected elements are assumed to have been
    scattered; torch pads the others (masked_scatter_backward, ATen/native/TensorAdvancedIndexing.cpp).
    Source: masked_select_out_cuda_impl, ATen/native/cuda/IndexKernel.cpp.
    """
    return (*true_elements_ops(args[1], target, Hold(8 * args[1].dim() * out.numel())), Outputs())


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
    """Return the ops of `masked_scatter`: running counts of true elements, and copies if needed.

    The counts are, for each element, of the true elements before it. A mask that must be expanded is copied.
    Source: masked_scatter__cuda and launch_masked_scatter_kernel, ATen/native/cuda/IndexKernel.cpp and
    IndexKernel.cu.
    """
    mask, source = args[1:3]
    many = out.numel()
    if not many:
        return ()
    copy = contiguous_copies(mask) if mask.shape == out.shape else (Hold(many),)
    return (Outputs(), Hold(8 * many), *copy, _scan_bytes(many), *contiguous_copies(source))


def _repeat_interleave(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops that number what is repeated: running sums of the repeats in int64, then the output.

    Source: ATen/native/Repeat.cpp.
    """
    repeats = args[0]
    many = repeats.numel()
    if not many:
        return ()
    converted = () if repeats.dtype is torch.int64 else (Hold(8 * many),)
    return (Hold(8 * many), *converted, _scan_bytes(many), *released(converted), Outputs())


def _segment_reduce(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `segment_reduce`: copies, the output, the segments' offsets, and CUB's storage.

    CUB reduces the segments of one-dimensional data (ATen/native/cuda/SegmentReduce.cu).
    """
    data, lengths = args[0], argument(args, 2)
    reduced = (1,) if data.dim() == 1 else ()
    return (*contiguous_copies(data, lengths), Outputs(), *_offsets(lengths), *reduced)


def _segment_reduce_backward(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of `segment_reduce`: copies, the output, and the segments' offsets."""
    lengths = argument(args, 4)
    return (*contiguous_copies(*args[:3], lengths), Outputs(), *_offsets(lengths))


def _offsets(lengths: Tensor | None) -> Ops:
    """Return the ops that join a zero and the lengths of segments, and sum them in place, or () for None."""
    if lengths is None or not lengths.numel():
        return ()
    zeros = lengths.numel() // lengths.shape[-1] * lengths.element_size()
    scan = (_scan_bytes(lengths.numel() + 1),) if lengths.dim() == 1 else ()
    return (Hold(zeros), Hold(zeros + tensor_bytes(lengths)), ReleaseBeneath(1), *scan)


def _scan_bytes(many: int) -> int:
    """Return the bytes of CUB's temporary storage for a scan of `many` elements.

    See dispatch_scan.cuh of CUB.
    """
    return _tiles_bytes(ceil_div(many, _SCANNED_TOGETHER))


def _tiles_bytes(tiles: int) -> int:
    """Return the bytes of CUB's temporary storage of a kernel that works on tiles, one after another.

    The storage has 16 bytes for each tile and for 32 further tiles, aligned to 256 bytes, and an alignment
    for each of two parts (util_temporary_storage.cuh of CUB).
    """
    return 256 * ceil_div(16 * (tiles + 32), 256) + 256 + 255


RULES: dict[str, Rule] = {
    "index.Tensor _unsafe_index.Tensor": _index,
    "masked_select": _masked_select,
    "masked_scatter_backward": _masked_select,
    "masked_scatter masked_scatter_": _masked_scatter,
    "roll": _roll,
    "embedding": _embedding,
    "scatter_reduce.two scatter_reduce_.two": _scattered_mean,
    "index_reduce index_reduce_": _indexed_mean,
    "repeat_interleave.Tensor": _repeat_interleave,
    "segment_reduce": _segment_reduce,
    "_segment_reduce_backward": _segment_reduce_backward,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _embedding_bag_backward,
    "index_put index_put_ _unsafe_index_put _index_put_impl_": _index_put,
}
