"""`binary_cross_entropy_with_logits` as on CUDA: its backward pass works in place.

torch/csrc/autograd/FunctionsManual.cpp, binary_cross_entropy_with_logits_backward, does so out of place for
tensors on meta (TensorSubclassLikeUtils.h), which would cost two more tensors of the input's size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.capture.meta_kernels.strides import contiguous

aten = torch.ops.aten
_MEAN = 1  # at::Reduction::Mean


class _Loss(torch.autograd.Function):
    """The loss, with the gradient of its first input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
    ) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            loss = aten.binary_cross_entropy_with_logits(x, target, weight, pos_weight, reduction)
        ctx.save_for_backward(x, target, weight, pos_weight)
        ctx.reduction = reduction
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """In the storage of the sigmoid, or with `pos_weight` of the term that it weighs."""
        x, target, weight, pos_weight = ctx.saved_tensors
        if pos_weight is None:
            found = _put_in_order(x).sigmoid().sub_(target)
        else:
            weighed = pos_weight.mul(target)
            found = weighed.add(1).sub_(target).mul_(_put_in_order(x).sigmoid()).sub_(weighed)
        found.mul_(grads[0])
        if weight is not None:
            found.mul_(weight)
        return found.div_(x.numel()) if ctx.reduction == _MEAN else found, None, None, None, None


def _binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Any:
    if target.requires_grad:  # a second derivative's path, which torch composes of other operators
        return _composed(x, target, weight, pos_weight, reduction)
    return _Loss.apply(x, target, weight, pos_weight, reduction)  # type: ignore[no-untyped-call]


def _put_in_order(x: Tensor) -> Tensor:
    """A view with the strides that CUDA's kernels give their result: contiguous ones for what has none but in
    dimensions of size 1 (ATen/TensorIterator.cpp, fast_set_up), which torch's meta kernels keep.
    """
    return x.as_strided(x.shape, contiguous(x.shape)) if x.is_contiguous() else x


def _composed(
    x: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> Tensor:
    positive = target * F.logsigmoid(x)
    loss = -(positive if pos_weight is None else positive * pos_weight) - (1 - target) * F.logsigmoid(-x)
    loss = loss if weight is None else loss * weight
    return loss.mean() if reduction == _MEAN else loss.sum() if reduction else loss


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel."""
    return {"binary_cross_entropy_with_logits": _binary_cross_entropy_with_logits}
