"""How the operands of a convolution lie in memory, and the copies that bring them into its format."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import channels_last, contiguous, is_in_format, strides_suggest_last
from planner.capture.workspaces.steps import Held, Step, copies, tensor_bytes


@dataclass(frozen=True, slots=True)
class Laid:
    """An operand as a kernel of two or three dimensions sees it: an image of one row for a sequence."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    size_bytes: Any
    suggests_last: bool
    can_be_last: bool  # not in double precision

    def copied(self, is_last: bool) -> "Laid":
        """Return a copy in one of the two formats."""
        strides = channels_last(self.shape) if is_last else contiguous(self.shape)
        return Laid(self.shape, strides, self.size_bytes, is_last, self.can_be_last)


def laid(t: Tensor) -> Laid:
    """Return how a tensor lies in memory."""
    shape, strides = tuple(t.shape), tuple(t.stride())
    if len(shape) == 3:  # Convolution.cpp, view4d
        strides = (*strides[:2], shape[2] * strides[2], strides[2])
        shape = (*shape[:2], 1, shape[2])
    suggests = strides_suggest_last(shape, strides)
    return Laid(shape, strides, tensor_bytes(t), suggests, t.dtype is not torch.float64)


def laid_input(x: Tensor) -> Laid:
    """Return how an input lies in memory once `copy_of_sequence` is made."""
    return laid(x).copied(is_last=False) if x.dim() == 3 else laid(x)


def copy_of_sequence(x: Tensor) -> tuple[Step, ...]:
    """Return the copy of a sequence that is not contiguous, which is made before anything else."""
    return copies(x) if x.dim() == 3 else ()


def is_last_of(a: Laid, b: Laid) -> bool:
    """Return whether cuDNN runs channels last (ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format)."""
    return a.can_be_last and (a.suggests_last or b.suggests_last)


def copy_to(t: Laid, is_last: bool) -> tuple[Step, ...]:
    """Return the copy that `contiguous` makes in a format."""
    return () if is_in_format(t.shape, t.strides, is_last) else (Held(t.size_bytes),)


def in_format(t: Laid, is_last: bool) -> Laid:
    """Return the operand as it lies after `contiguous` in a format."""
    return t if is_in_format(t.shape, t.strides, is_last) else t.copied(is_last)
