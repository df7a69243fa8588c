"""Scratch memory of losses: the unreduced loss, which is made in full before its mean or sum is taken.

ATen/native/BinaryOps.cpp, Loss.cpp and cuda/Loss.cu.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import broadcast
from planner.capture.workspaces.steps import Held, Made, Rule, Step, argument, copies, tensor_bytes
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program import Target

aten = torch.ops.aten

_NONE = 0  # at::Reduction::None


def _whole(x: Tensor, target: Tensor) -> int:
    """Bytes of the unreduced loss."""
    return x.element_size() * prod(broadcast([x.shape, target.shape]) or ())


def _result_first(at: int) -> Rule:
    """The scalar is made first (a structured operator); argument number `at` is the reduction."""

    def rule(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
        if argument(args, at, 1) == _NONE:
            return ()
        return Made.REST, Held(_whole(args[0], args[1])), *reduction(args[0], None, 4, chip)

    return rule


def _result_last(at: int, temporaries: int) -> Rule:
    """So many tensors like the loss are made first, the last of which is the result if it is not reduced."""

    def rule(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
        whole = Held(_whole(args[0], args[1]))
        if argument(args, at, 1) == _NONE:
            return (*[whole] * (temporaries - 1), Made.REST)
        return (*[whole] * temporaries, Made.REST, *reduction(args[0], None, 4, chip))

    return rule


def _binary_cross_entropy(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The unreduced loss is the result's own storage (cuda/layouts.py); its mean is copied into it."""
    if argument(args, 3, 1) == _NONE:
        return ()
    return Made.REST, Held(args[0].element_size()), *reduction(args[0], None, 4, chip)


def _ctc_loss(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """Lengths and offsets of the targets on the GPU (ATen/native/cuda/LossCTC.cu)."""
    samples = 8 * args[0].shape[1]
    return (*copies(args[0]), Held(samples), Held(samples), Held(samples), Made.REST)


def _ctc_loss_backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The backward variables, as large as the forward ones."""
    alpha = args[6]
    samples = 8 * args[1].shape[1]
    return Made.REST, Held(tensor_bytes(alpha)), Held(samples), Held(samples), Held(samples)


RULES: dict[Any, Rule] = {
    aten.mse_loss.default: _result_first(2),
    aten.smooth_l1_loss.default: _result_first(2),
    aten.huber_loss.default: _result_last(2, 1),
    aten.soft_margin_loss.default: _result_last(2, 2),
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.binary_cross_entropy_with_logits.default: _result_last(4, 2),
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
