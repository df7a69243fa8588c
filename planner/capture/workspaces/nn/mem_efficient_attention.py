"""Workspace rules of CUTLASS's memory-efficient attention kernels.

Sources are the headers that torch 2.13 installs: mem_eff_attention/kernels/cutlassF.h and cutlassB.h select a
variant, kernel_forward.h and kernel_backward.h define its workspace. Other memory is allocated in
ATen/native/transformers/cuda/attention.cu and attention_backward.cu.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces._rule import argument, ceil_div, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Ops, Outputs, ReleaseBeneath
from planner.program import Target

_RF_WIDTH = 128  # up to this width of a head, every forward variant keeps its output in registers
_ANY_WIDTH = 65536


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the backward kernel for a tile of scores, a width of heads and an architecture."""

    queries: int  # rows of a tile of scores
    keys: int  # columns of a tile of scores
    width: int  # of the widest head that it accepts
    half: bool  # whether it is for half precision
    generation: int  # the architecture for which it is compiled: 50, 70, 75 or 80

    @property
    def keeps_outputs(self) -> bool:
        """Return whether the gradients of keys and values stay in registers (kOutputInRF)."""
        return self.half and self.width <= self.queries

    @property
    def computes_delta(self) -> bool:
        """Return whether the kernel itself computes the row sums of grad * out (kKernelComputesDelta)."""
        return self.half and (self.keeps_outputs or self.generation != 70)


def forward(args: Args, out: Any, target: Target) -> Ops:
    """Return a float32 accumulator's ops if half-precision heads are wider than `_RF_WIDTH`, else ().

    The ops are of the forward pass, and make the outputs first. The wider heads of keys and values count.
    """
    key, value = args[1], args[2]
    half = value.dtype is not torch.float32
    if half and max(key.shape[-1], value.shape[-1]) > _RF_WIDTH:
        return (Outputs(), 4 * out[0].numel())
    return ()


def backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of the backward pass: a copy of the gradient, outputs, row sums and accumulators.

    Delta is the row sums of grad * out. If the kernel does not compute delta, the product, its row sums and
    their contiguous transpose, which is delta, are alive together: temporaries of a C++ expression die at its
    end.
    """
    grad, query, key, value = args[:4]
    batch, heads, rows, _ = query.shape
    dropout = argument(args, 9, 0.0)
    variant = backward_variant(query.dtype, max(query.shape[-1], value.shape[-1]), dropout, target.capability)
    transposed = grad.transpose(1, 2)
    copy = Hold(0 if transposed.is_contiguous() else tensor_bytes(grad))
    delta = Hold(4 * batch * heads * rows)
    workspace = workspace_bytes(variant, query, key, value)
    if variant.computes_delta:
        return (copy, Outputs(), delta, workspace)
    product = [Hold(4 * grad.numel())] * (3 if variant.half else 1)  # halves are converted to float32 first
    if heads > 1 and rows > 1:
        product.append(delta)  # the row sums before they are transposed to delta
    return (copy, Outputs(), *product, delta, *[ReleaseBeneath(1)] * len(product), workspace)


def backward_variant(
    dtype: torch.dtype, width: int, dropout_p: float, capability: tuple[int, int]
) -> Variant:
    """Return the first variant in cutlassB.h that accepts the width of heads and fits in shared memory.

    Tiles of 128 queries do not fit on GPUs with 64 or 99 KiB per block (7.5, 8.6, 8.9, 12.x). This is
    inferred from the narrower tiles that follow them in the list, not from the sizes of the structures.
    """
    half = dtype is not torch.float32
    generation = next(g for g in (80, 75, 70, 50) if capability[0] * 10 + capability[1] >= g)
    roomy = capability in ((7, 0), (7, 2), (8, 0), (8, 7)) or (9, 0) <= capability < (12, 0)
    wide_tiles = generation >= 80 or (generation >= 70 and half)
    if width <= 64:
        return Variant(64, 64, 32 if width <= 32 else 64, half, generation)
    if half and width <= 96 and capability in ((8, 6), (8, 9)) and dropout_p == 0:
        return Variant(128, 64, 96, half, generation)
    limit = 128 if width <= 128 else _ANY_WIDTH
    if not (wide_tiles and roomy):
        return Variant(64, 64, limit, half, generation)
    square = half and generation == 80 and limit == 128
    return Variant(128, 128 if square else 64, limit, half, generation)


def workspace_bytes(variant: Variant, query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes of the backward kernel's workspace (`Params::workspace_size`).

    Gradients are accumulated there in float32. torch 2.0 needed no workspace for floats. Later versions split
    the keys over blocks if the compute capability is at least 7.0, which needs an accumulator for the
    queries' gradient.
    """
    batch, heads, rows, width = query.shape
    stored = 0
    if not variant.keeps_outputs and variant.half:
        per_split = variant.keys * (_up(width, variant.queries) + _up(value.shape[-1], variant.queries))
        stored += _key_splits(variant, batch * heads, key.shape[-2]) * per_split
    if variant.half or variant.generation >= 70:
        tiles = ceil_div(rows, variant.queries) * ceil_div(width, variant.keys)
        stored += tiles * (variant.queries * variant.keys + 4)  # with a lock, a counter and padding
    return 4 * batch * heads * _up(stored, 4)


def _key_splits(variant: Variant, blocks: int, keys: int) -> int:
    """Return the number of thread blocks that share the keys of one head.

    Source: attention_backward.cu. `blocks` is the batch size times the number of heads.
    """
    if variant.generation < 70 or torch.are_deterministic_algorithms_enabled():
        return 1
    splits = ceil_div(keys, variant.keys)
    if blocks >= 256 and keys <= 2 * variant.keys:
        splits = 1
    return max(1, min(splits, 200 // blocks))


def _up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple
