"""Workspace rules of FSDP's copies between many tensors and one.

A single kernel copies by a table. A table has 8 bytes for each address, size and thread block
(ATen/native/cuda/TensorShape.cu).
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import is_dense
from planner.capture.workspaces._rule import ceil_div
from planner.capture.workspaces.ops import Args, Hold, Ops, Rule
from planner.program import Target, threads_per_sm

_BLOCK_THREADS = 128
_TILE_BYTES = 16 * _BLOCK_THREADS  # bytes that a thread block copies at a time


def _split_with_sizes_copy(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `split_with_sizes_copy`: a table for one kernel, or () if it copies part by part."""
    source, sizes, dim, parts = args[:4]
    if not _are_dense(source, *parts) or any(part.dtype is not source.dtype for part in parts):
        return ()  # copied one after another
    chunk_bytes = [size * source.stride(dim) * source.element_size() for size in sizes]
    chunks = prod(source.shape[:dim])
    tiles = sum(ceil_div(one, _TILE_BYTES) for one in chunk_bytes) * chunks
    most_blocks = target.sm_count * threads_per_sm(target.capability) // _BLOCK_THREADS * 2
    rounds = ceil_div(tiles, most_blocks)
    chunks_per_block = 1
    while chunks_per_block * chunks_per_block < rounds and chunks_per_block < chunks:
        chunks_per_block += 1
    block_bytes = _TILE_BYTES * ceil_div(rounds, chunks_per_block)
    blocks = sum(ceil_div(one, block_bytes) for one in chunk_bytes)
    return (8 * (4 * len(sizes) + 1 + blocks),)


def _chunk_cat(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `_chunk_cat`: a table for one kernel, or else padded copies of uneven tensors.

    Chunks of tensors are concatenated. If a single kernel cannot do it, tensors that do not split into equal
    chunks are padded.
    """
    tensors, dim, chunks, whole = args[:4]
    dtype = tensors[0].dtype
    casts = dtype is not whole.dtype
    if not _are_dense(*tensors) or (casts and (dtype, whole.dtype) != (torch.bfloat16, torch.float32)):
        uneven = (one for one in tensors if one.shape[dim] % chunks)
        return tuple(
            Hold(_padded(one, dim, chunks) * prod(one.shape[:dim]) * dtype.itemsize) for one in uneven
        )
    unit = whole.element_size()
    blocks = sum(ceil_div(_padded(one, dim, chunks) // chunks * unit, _TILE_BYTES) for one in tensors)
    return (8 * (6 * len(tensors) + 2 + blocks),)


def _padded(tensor: Tensor, dim: int, chunks: int) -> int:
    """Return the product of the sizes from `dim` on, with `dim` padded to a multiple of `chunks`."""
    return ceil_div(tensor.shape[dim], chunks) * chunks * prod(tensor.shape[dim + 1 :])


def _are_dense(*tensors: Tensor) -> bool:
    """Return whether all tensors are contiguous apart from the order of their dimensions."""
    return all(is_dense(one.shape, one.stride()) for one in tensors)


RULES: dict[str, Rule] = {"_chunk_cat.out": _chunk_cat, "split_with_sizes_copy.out": _split_with_sizes_copy}
RULES_BY_NAME: Mapping[str, Rule] = {
    "fsdp::chunk_cat": _chunk_cat,
    "fsdp::split_with_sizes_copy": _split_with_sizes_copy,
}
