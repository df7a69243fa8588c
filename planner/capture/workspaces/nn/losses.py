"""Workspace rules of losses.

Most losses make the unreduced loss before its mean or sum. Sources: ATen/native/BinaryOps.cpp, Loss.cpp and
cuda/Loss.cu.
"""

from math import prod
from typing import Any

from torch import Tensor

from planner.capture.meta_kernels.strides import broadcast
from planner.capture.workspaces._rule import argument, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Ops, Output, Outputs, Release, ReleaseBeneath, Rule
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program import Target

_NONE = 0  # at::Reduction::None


def _whole(x: Tensor, target: Tensor) -> int:
    """Return the bytes of the unreduced loss, which has the broadcast shape of input and target."""
    return x.element_size() * prod(broadcast([x.shape, target.shape]) or ())


def _result_first(at: int) -> Rule:
    """Return the rule of a loss that makes its result, then the unreduced loss that it reduces.

    The loss's argument at position `at` is the kind of reduction.
    """

    def rule(args: Args, out: Any, target: Target) -> Ops:
        if argument(args, at, 1) == _NONE:
            return ()
        return Outputs(), Hold(_whole(args[0], args[1])), *reduction(args[0], None, 4, target)

    return rule


def _result_last(at: int, temporaries: int) -> Rule:
    """Return the rule of a loss that makes `temporaries` tensors of full size before its result.

    The loss's argument at position `at` is the kind of reduction. Without reduction, the last of the
    `temporaries` tensors is the result.
    """

    def rule(args: Args, out: Any, target: Target) -> Ops:
        whole = Hold(_whole(args[0], args[1]))
        if argument(args, at, 1) == _NONE:
            return (*[whole] * (temporaries - 1), Outputs())
        return (*[whole] * temporaries, Outputs(), *reduction(args[0], None, 4, target))

    return rule


def _copied_result(at: int) -> Rule:
    """Return the rule of a loss that copies its mean or sum into the storage of the unreduced loss.

    The loss's argument at position `at` is the kind of reduction. See `meta_kernels/cuda_layouts.py`.
    """

    def rule(args: Args, out: Any, target: Target) -> Ops:
        if argument(args, at, 1) == _NONE:
            return ()
        return Outputs(), Hold(args[0].element_size()), *reduction(args[0], None, 4, target)

    return rule


def _soft_margin_loss_backward(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of the gradient of soft margin loss: two factors and their product's exponential."""
    whole = Hold(tensor_bytes(out))
    return whole, whole, whole, ReleaseBeneath(1), ReleaseBeneath(1), Outputs()


def _ctc_loss(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of CTC loss: three blocks for lengths and offsets of targets, then the outputs.

    Source: ATen/native/cuda/LossCTC.cu.
    """
    samples = 8 * args[0].shape[1]
    return Hold(samples), Hold(samples), Hold(samples), Output(1), Outputs()  # the forward variables first


def _ctc_loss_backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of CTC loss's backward pass: lengths, the backward variables, and sums of blanks.

    The backward variables are as large as the forward variables. Only a large problem sums the variables of
    blanks, by `logsumexp`, and with `zero_infinity` replaces gradients of infinite losses in a copy.
    """
    scores, alpha = args[1], args[6]
    steps, samples, labels = scores.shape
    variables = (*(Hold(8 * samples),) * 3, Hold(tensor_bytes(alpha)))
    if 2 * steps + 24 * samples // 10 + 2 * labels // 10 <= 450:
        return (*variables, Outputs())
    item, rows = scores.element_size(), steps * samples
    of_blanks, of_rows = Hold(item * rows * (alpha.shape[2] // 2 + 1)), Hold(item * rows)
    maximum = of_blanks, of_rows, of_rows, Hold(rows), Release(2)
    total = *maximum, of_blanks, of_rows, Release(4)
    if not argument(args, 8, False):
        return (*variables, Outputs(), *total)
    return (*variables, Hold(tensor_bytes(out)), *total, Hold(item), Hold(samples), Outputs())


RULES: dict[str, Rule] = {
    "mse_loss smooth_l1_loss": _result_first(2),
    "huber_loss": _result_last(2, 1),
    "soft_margin_loss": _copied_result(2),
    "soft_margin_loss_backward": _soft_margin_loss_backward,
    "binary_cross_entropy": _copied_result(3),
    "binary_cross_entropy_with_logits": _result_last(4, 2),
    "_ctc_loss _ctc_loss.Tensor": _ctc_loss,
    "_ctc_loss_backward _ctc_loss_backward.Tensor": _ctc_loss_backward,
}
