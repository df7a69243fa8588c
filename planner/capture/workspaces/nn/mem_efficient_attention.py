"""Scratch memory of the memory-efficient attention kernels, CUTLASS's.

Which variant runs is decided by mem_eff_attention/kernels/cutlassF.h and cutlassB.h, what it needs by
kernel_forward.h and kernel_backward.h (the headers that torch 2.13 installs), what is allocated around it
by ATen/native/transformers/cuda/attention.cu and attention_backward.cu.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.steps import Held, Made, ReleaseBeneath, Step, argument, tensor_bytes
from planner.program import Target

_RF_WIDTH = 128  # up to this width of a head, every forward variant keeps its output in registers
_ANY_WIDTH = 65536


@dataclass(frozen=True, slots=True)
class Variant:
    """A backward kernel: the tile of scores that a block computes, and the widest head it takes."""

    queries: int
    keys: int
    width: int
    half: bool
    generation: int  # the architecture that it is compiled for: 50, 70, 75 or 80

    @property
    def keeps_outputs(self) -> bool:
        """Whether the gradients of keys and values stay in registers (kOutputInRF)."""
        return self.half and self.width <= self.queries

    @property
    def computes_delta(self) -> bool:
        """Whether the row sums of grad * out are made inside (kKernelComputesDelta)."""
        return self.half and (self.keeps_outputs or self.generation != 70)


def forward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """An accumulator in float32 beside the output, for halves whose heads do not fit in registers."""
    key, value = args[1], args[2]
    half = value.dtype is not torch.float32
    if half and max(key.shape[-1], value.shape[-1]) > _RF_WIDTH:
        return (Made.REST, 4 * out[0].numel())
    return ()


def backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """A contiguous gradient, the gradients, delta (the row sums of grad * out), and the accumulators.

    Where the kernel does not compute delta, the product, its row sums and their contiguous transpose, which
    is delta, are alive together: temporaries of one C++ expression die at its end.
    """
    grad, query, key, value = args[:4]
    batch, heads, rows, _ = query.shape
    dropout = argument(args, 9, 0.0)
    variant = backward_variant(query.dtype, max(query.shape[-1], value.shape[-1]), dropout, chip.capability)
    transposed = grad.transpose(1, 2)
    copy = Held(0 if transposed.is_contiguous() else tensor_bytes(grad))
    delta = Held(4 * batch * heads * rows)
    workspace = workspace_bytes(variant, query, key, value)
    if variant.computes_delta:
        return (copy, Made.REST, delta, workspace)
    product = [Held(4 * grad.numel())] * (3 if variant.half else 1)  # halves are converted to float32 first
    if heads > 1 and rows > 1:
        product.append(delta)  # the sums as they come, of which delta is the transpose
    return (copy, Made.REST, *product, delta, ReleaseBeneath(len(product)), workspace)


def backward_variant(
    dtype: torch.dtype, width: int, dropout_p: float, capability: tuple[int, int]
) -> Variant:
    """The first kernel of cutlassB.h that takes a head of this width and fits in shared memory.

    Tiles of 128 queries do not fit on GPUs with 64 or 99 KiB a block (7.5, 8.6, 8.9, 12.x); that is
    inferred from why the list has narrower ones behind them, not from the sizes of the structures.
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
    """`Params::workspace_size`: where gradients are accumulated in float32.

    torch 2.0 had none for floats; splitting the keys over blocks, which needs the one for queries, came
    later and stands from compute capability 7.0 on.
    """
    batch, heads, rows, width = query.shape
    stored = 0
    if not variant.keeps_outputs and variant.half:
        per_split = variant.keys * (_up(width, variant.queries) + _up(value.shape[-1], variant.queries))
        stored += _key_splits(variant, batch * heads, key.shape[-2]) * per_split
    if variant.half or variant.generation >= 70:
        tiles = -(-rows // variant.queries) * -(-width // variant.keys)
        stored += tiles * (variant.queries * variant.keys + 4)  # with a lock, a counter and padding
    return 4 * batch * heads * _up(stored, 4)


def _key_splits(variant: Variant, blocks: int, keys: int) -> int:
    """Over how many blocks the keys of one head are spread (attention_backward.cu) by a variant that
    accumulates the gradients of keys and values.
    """
    if variant.generation < 70 or torch.are_deterministic_algorithms_enabled():
        return 1
    splits = -(-keys // variant.keys)
    if blocks >= 256 and keys <= 2 * variant.keys:
        splits = 1
    return max(1, min(splits, 200 // blocks))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
