"""Define operators of torchvision's compiled extension for a torch beside which it does not load.

Schemas, shapes and what autograd keeps are those of torchvision 0.28: csrc/ops/roi_align.cpp, nms.cpp and
csrc/ops/autograd/roi_align_kernel.cpp, which saves the regions and the size of the input, not the input.
"""

from typing import Any

import torch
from torch import Tensor

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_GRID = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SCHEMAS = {
    "nms": _NMS,
    "qnms": _NMS,
    "roi_align": f"(Tensor input, Tensor rois, {_GRID}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": (
        f"(Tensor grad, Tensor rois, {_GRID}, SymInt batch_size, SymInt channels, SymInt height, "
        "SymInt width, int sampling_ratio, bool aligned) -> Tensor"
    ),
}


def define_missing() -> None:
    """Define the operators that are missing, for the life of the process."""
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    for name in missing:
        # `define` without a library of its own keeps the definition for the life of the process.
        torch.library.define(f"torchvision::{name}", _SCHEMAS[name])
    if "roi_align" in missing:
        torch.library.impl("torchvision::roi_align", "Meta", _roi_align)
        torch.library.impl("torchvision::_roi_align_backward", "Meta", _roi_align_backward)
        torch.library.register_autograd("torchvision::roi_align", _backward, setup_context=_remember)


def _roi_align(input: Tensor, rois: Tensor, scale: float, height: int, width: int, *_: Any) -> Tensor:
    return input.new_empty((rois.shape[0], input.shape[1], height, width))


def _roi_align_backward(
    grad: Tensor, rois: Tensor, scale: float, pooled_height: int, pooled_width: int, batch: int,
    channels: int, height: int, width: int, *_: Any,
) -> Tensor:  # fmt: skip
    return grad.new_empty((batch, channels, height, width))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    image, rois, *ctx.grid, ctx.sampling_ratio, ctx.aligned = inputs
    ctx.save_for_backward(rois)
    ctx.shape = image.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (rois,) = ctx.saved_tensors
    of_input = torch.ops.torchvision._roi_align_backward(
        grad, rois, *ctx.grid, *ctx.shape, ctx.sampling_ratio, ctx.aligned
    )
    return of_input, None, None, None, None, None, None
