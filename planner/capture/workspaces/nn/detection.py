"""Workspace rules of `nonzero` and of torchvision's compiled operators for detectors.

Sources: ATen/native/cuda/Nonzero.cu; torchvision/csrc/ops/cuda/nms_kernel.cu and roi_align_kernel.cu (0.28).
"""

from typing import Any

from torch import Tensor

from planner.capture.workspaces._rule import ceil_div, contiguous_copies, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Ops, Outputs, Release, Rule
from planner.capture.workspaces.tensor.indexing import true_elements_ops
from planner.capture.workspaces.tensor.sorting import held_blocks, sort_ops
from planner.program import Target

_BOXES_PER_WORD = 64  # threadsPerBlock of nms_kernel.cu: a word has one bit for each box


def _nonzero(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `nonzero`: workspaces to count and find the nonzero elements, and the output."""
    return true_elements_ops(args[0], target, Outputs())


def _nms(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of torchvision's nms: a sort of boxes by score, and a bit for each pair of boxes."""
    boxes, scores = args[:2]
    many = boxes.shape[0]
    if not many:
        return ()
    sort = [op for op in sort_ops(scores, 0, target) if op != Outputs()]
    return (
        Hold(8 * many),
        Hold(tensor_bytes(scores)),
        *sort,
        Release(held_blocks(tuple(sort)) + 1),  # the sorted scores, which are not read
        Hold(tensor_bytes(boxes)),
        Hold(8 * many * ceil_div(many, _BOXES_PER_WORD)),
        Hold(tensor_bytes(out)),  # ranks of the kept boxes, copied back from the CPU
        Outputs(),
    )


def _roi_align(args: Args, out: Tensor, target: Target) -> Ops:
    return (Outputs(), *contiguous_copies(*args[:2])) if out.numel() else ()


def _roi_align_backward(args: Args, out: Tensor, target: Target) -> Ops:
    return (Outputs(), *contiguous_copies(args[1])) if args[0].numel() else ()


RULES: dict[str, Rule] = {"nonzero": _nonzero}
# Given by name, since torchvision's operators exist only after torchvision, or the shim for it, is imported.
RULES_BY_NAME: dict[str, Rule] = {
    "torchvision::nms": _nms,
    "torchvision::roi_align": _roi_align,
    "torchvision::_roi_align_backward": _roi_align_backward,
}
