"""`rms_norm` as on CUDA: one kernel that saves the input and one figure per row.

ATen/native/layer_norm.cpp (torch 2.9 and later): `_fused_rms_norm`, save for tensors in a channels-last
format and for weights of another type than the input's, which take the composite path. On meta that path
is always taken.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import suggests_channels_last

aten = torch.ops.aten


class _RmsNorm(torch.autograd.Function):
    """`_fused_rms_norm` has a composite kernel on meta, which autograd would take apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalized: list[int], weight: Tensor | None, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd = aten._fused_rms_norm(x, normalized, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.normalized = normalized
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            dx, dweight = aten._fused_rms_norm_backward(grads[0], x, ctx.normalized, rstd, weight, mask)
        return dx, None, dweight, None


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    mixed = weight is not None and weight.dtype is not x.dtype
    if mixed or (suggests_channels_last(x) and not x.is_contiguous()):
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
    return _RmsNorm.apply(x, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel."""
    return {"rms_norm": _rms_norm}
