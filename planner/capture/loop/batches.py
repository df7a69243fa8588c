"""Batches of torchvision's detectors: lists of images, and in training a target for each."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from planner.jobs import Job, Mode

OBJECTS = 8  # per image; COCO has 7.7 in the mean (Lin et al., Microsoft COCO, 2014)
_KINDS = (
    ("generalized_rcnn", "GeneralizedRCNN"),
    ("retinanet", "RetinaNet"),
    ("fcos", "FCOS"),
    ("ssd", "SSD"),
)


def is_detector(model: nn.Module) -> bool:
    """Whether the model takes its images as a list and its targets beside them."""
    modules = [(sys.modules.get(f"torchvision.models.detection.{file}"), name) for file, name in _KINDS]
    return isinstance(model, tuple(getattr(module, name) for module, name in modules if module is not None))


def detection_batch(
    model: nn.Module, job: Job, batch: int, device: str
) -> tuple[tuple[Any, ...], dict[str, Tensor], None]:
    """`batch` images of the job's first input and their targets, each copied to the device by itself.

    Boxes are of many sizes all over the image; masks and points come with the models that ask for them.
    """
    shape = job.inputs[0].shape
    height, width = shape[-2:]
    dtype = getattr(torch, job.inputs[0].dtype)
    images = [torch.empty(shape, dtype=dtype, device=device) for _ in range(batch)]
    if job.mode is Mode.INFER:
        return (images,), {}, None
    return (images, [_target(model, height, width, device) for _ in range(batch)]), {}, None


def _target(model: nn.Module, height: int, width: int, device: str) -> dict[str, Tensor]:
    target = {
        "boxes": _boxes(height, width).to(device),
        "labels": torch.ones(OBJECTS, dtype=torch.int64).to(device),
    }
    heads = getattr(model, "roi_heads", None)
    if getattr(heads, "mask_predictor", None) is not None:
        target["masks"] = torch.empty((OBJECTS, height, width), dtype=torch.uint8, device=device)
    predictor = getattr(heads, "keypoint_predictor", None)
    if predictor is not None:
        target["keypoints"] = _points(height, width, predictor.kps_score_lowres.out_channels).to(device)
    return target


def _boxes(height: int, width: int) -> Tensor:
    """From a sixteenth of the image to half of it, their centres on a diagonal."""
    step = torch.arange(1, OBJECTS + 1) / (OBJECTS + 1)
    middle = torch.stack((step * width, step * height), 1)
    half = middle.new_tensor([width, height]) * (1 + torch.arange(OBJECTS) % 4)[:, None] / 16
    edge = middle.new_tensor([width - 1, height - 1])
    return torch.cat(((middle - half).clamp(min=0), torch.minimum(middle + half, edge)), 1)


def _points(height: int, width: int, points: int) -> Tensor:
    """Each object's points at the middle of its box, all of them visible."""
    boxes = _boxes(height, width)
    middle = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2
    return torch.cat((middle, torch.ones(OBJECTS, 1, 1)), 2).repeat(1, points, 1)
