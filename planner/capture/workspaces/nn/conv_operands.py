"""Calls of convolutions, their operands, and copies of operands in a common memory format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import (
    channels_last,
    contiguous,
    is_in_format,
    strides_suggest_channels_last,
)
from planner.capture.workspaces._rule import contiguous_copies, tensor_bytes
from planner.capture.workspaces.ops import Hold, Ops
from planner.program import Target


@dataclass(frozen=True, slots=True)
class ConvCall:
    """A call of a convolution's forward or backward pass. `y` is the output or its gradient."""

    x: Tensor
    weight: Tensor
    y: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int
    target: Target

    def of_each_dimension(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return a stride, padding or dilation as one number per spatial dimension.

        A single number is repeated: `padding="valid"` gives one zero (`expand_param_if_needed`,
        Convolution.cpp).
        """
        return tuple(map(int, sizes)) * (self.x.dim() - 2 if len(sizes) == 1 else 1)


@dataclass(frozen=True, slots=True)
class ConvOperand:
    """An operand of a convolution: shape, strides and size, with a sequence as an image of one row."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    size_bytes: Any
    suggests_last: bool
    can_be_last: bool  # whether cuDNN may run it in channels last; false in float64

    def copied(self, is_last: bool) -> "ConvOperand":
        """Return the description of a copy of the operand, in channels last if `is_last`, else contiguous."""
        strides = channels_last(self.shape) if is_last else contiguous(self.shape)
        return ConvOperand(self.shape, strides, self.size_bytes, is_last, self.can_be_last)

    def copies_to(self, is_last: bool) -> Ops:
        """Return the op that copies the operand to the format given by `is_last`, or () if it has it."""
        return () if is_in_format(self.shape, self.strides, is_last) else (Hold(self.size_bytes),)

    def contiguous(self, is_last: bool) -> "ConvOperand":
        """Return the operand if it has the format given by `is_last`, else the description of its copy."""
        return self if is_in_format(self.shape, self.strides, is_last) else self.copied(is_last)

    def group_of(self, groups: int) -> "ConvOperand":
        """Return the slice of the operand that holds one of `groups` groups of its channels.

        Strides do not change.
        """
        shape = (self.shape[0], self.shape[1] // groups, *self.shape[2:])
        size_bytes = self.size_bytes // groups
        return ConvOperand(shape, self.strides, size_bytes, self.suggests_last, self.can_be_last)


def operand_of(t: Tensor) -> ConvOperand:
    """Convert a tensor to a convolution's operand; a sequence becomes an image of one row."""
    shape, strides = tuple(t.shape), tuple(t.stride())
    if len(shape) == 3:  # Convolution.cpp, view4d
        strides = (*strides[:2], shape[2] * strides[2], strides[2])
        shape = (*shape[:2], 1, shape[2])
    suggests = strides_suggest_channels_last(shape, strides)
    return ConvOperand(shape, strides, tensor_bytes(t), suggests, t.dtype is not torch.float64)


def input_of(x: Tensor) -> ConvOperand:
    """Convert a convolution's input to an operand; the input of a 1D convolution counts as contiguous.

    `copy_of_sequence` is the copy that makes it so.
    """
    return operand_of(x).copied(is_last=False) if x.dim() == 3 else operand_of(x)


def copy_of_sequence(x: Tensor) -> Ops:
    """Return the op that copies an input sequence that is not contiguous, or () for any other input."""
    return contiguous_copies(x) if x.dim() == 3 else ()


def is_channels_last(a: ConvOperand, b: ConvOperand) -> bool:
    """Return whether cuDNN runs a convolution of operands `a` and `b` in the channels-last format.

    Source: ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format.
    """
    return a.can_be_last and (a.suggests_last or b.suggests_last)
