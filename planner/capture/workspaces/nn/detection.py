"""Scratch memory of what detectors run: `nonzero`, and torchvision's compiled operators, known by name.

ATen/native/cuda/Nonzero.cu; torchvision/csrc/ops/cuda/nms_kernel.cu and roi_align_kernel.cu (0.28).
"""

from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.steps import Held, Made, Release, Rule, Step, copies, tensor_bytes
from planner.capture.workspaces.tensor.sorting import sort_steps
from planner.program import Target

aten = torch.ops.aten

_BOXES_PER_WORD = 64  # threadsPerBlock of nms_kernel.cu: one bit for each of so many boxes


def _nonzero(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """The count, which a reduction of CUB makes, and after the result a selection of CUB.

    How many elements CUB's blocks take is from memory; both temporary storages are a few KiB per million.
    """
    many = args[0].numel()
    if not many:
        return ()
    partial = min(-(-many // 4096), 40 * chip.sm_count)
    return (*copies(args[0]), Held(4), 4 * partial, Made.REST, 8 * (32 + -(-many // 2048)))


def _nms(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    """The order of the scores, the boxes in that order, and for each pair of boxes a bit."""
    boxes, scores = args[:2]
    many = boxes.shape[0]
    if not many:
        return ()
    sort = [step for step in sort_steps(scores, 0) if not isinstance(step, Made)]
    held = sum(isinstance(step, Held) for step in sort)
    return (
        Held(8 * many),
        Held(tensor_bytes(scores)),
        *sort,
        Release(held + 1),  # the sorted scores, which nobody wants
        Held(tensor_bytes(boxes)),
        Held(8 * many * -(-many // _BOXES_PER_WORD)),
        Held(tensor_bytes(out)),  # which of the order stay, back from the CPU
        Made.REST,
    )


def _roi_align(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    return (Made.REST, *copies(*args[:2])) if out.numel() else ()


def _roi_align_backward(args: tuple[Any, ...], out: Tensor, chip: Target) -> tuple[Step, ...]:
    return (Made.REST, *copies(args[1])) if args[0].numel() else ()


RULES: dict[Any, Rule] = {aten.nonzero.default: _nonzero}
# By name, since torchvision's operators are not there before it, or what stands in for it, is imported.
BY_NAME: dict[str, Rule] = {
    "torchvision::nms": _nms,
    "torchvision::roi_align": _roi_align,
    "torchvision::_roi_align_backward": _roi_align_backward,
}
