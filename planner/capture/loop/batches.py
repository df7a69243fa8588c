"""Make uninitialised batches of a job.

For torchvision's detectors, a batch is a list of images and a list of targets.
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.capture.loop.precision import convert_inputs, format_of
from planner.capture.loop.runtime import Batch, BatchLoader
from planner.capture.models.transformers.contents import OBJECTS, known_contents
from planner.jobs import Job, Mode, TensorSpec, batch_of_specs, evaluated_job

_DETECTORS = (
    ("generalized_rcnn", "GeneralizedRCNN"),
    ("retinanet", "RetinaNet"),
    ("fcos", "FCOS"),
    ("ssd", "SSD"),
)


def batch_loader(model: nn.Module, job: Job, batch: int) -> BatchLoader:
    """Return a function that makes a batch of `batch` samples on the meta device at each call."""
    if _is_detector(model):
        return lambda: detection_batch(model, job, batch)
    known = known_contents(model, job, batch)
    return lambda: empty_batch(job, batch, "meta", known)


def evaluation_loader(model: nn.Module, job: Job, batch: int) -> BatchLoader:
    """Return a function that makes a batch of the job's evaluation on the meta device at each call.

    The batch has `batch` samples, unless the job gives a batch size for evaluation.
    """
    return batch_loader(model, convert_inputs(evaluated_job(job)), job.loop.eval_batch or batch)


def empty_batch(job: Job, batch: int, device: str, known: Mapping[str, Any] = MappingProxyType({})) -> Batch:
    """Return a batch of uninitialised inputs and targets, except for the values in `known`.

    `known` holds the values of some keyword inputs, which are copied to the device. Names that the job does
    not list as inputs are added.
    """

    def empty(spec: TensorSpec) -> Tensor:
        if spec.keyword is not None and spec.keyword in known:
            return copied(known[spec.keyword])  # type: ignore[no-any-return]
        shape, dtype = (batch, *spec.shape), getattr(torch, spec.dtype)
        return torch.empty(shape, dtype=dtype, device=device, memory_format=format_of(job, shape, dtype))

    def copied(value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    args, kwargs, target = batch_of_specs(job, empty)
    return args, kwargs | {name: copied(known[name]) for name in known if name not in kwargs}, target


def detection_batch(model: nn.Module, job: Job, batch: int) -> Batch:
    """Return a detector's arguments: a list of images and, except in the mode `infer`, a list of targets.

    The images have the shape of the job's first input. Each tensor is a separate allocation on the meta
    device. Boxes have varying sizes and positions; masks and keypoints are included for models that need
    them.
    """
    shape = job.samples.inputs[0].shape
    height, width = shape[-2:]
    dtype = getattr(torch, job.samples.inputs[0].dtype)
    images = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(batch)]
    if job.loop.mode is Mode.INFER:
        return (images,), {}, None
    return (images, [_target(model, height, width) for _ in range(batch)]), {}, None


def _is_detector(model: nn.Module) -> bool:
    modules = [(sys.modules.get(f"torchvision.models.detection.{file}"), name) for file, name in _DETECTORS]
    return isinstance(model, tuple(getattr(module, name) for module, name in modules if module is not None))


def _target(model: nn.Module, height: int, width: int) -> dict[str, Tensor]:
    target = {
        "boxes": _boxes(height, width).to("meta"),
        "labels": torch.ones(OBJECTS, dtype=torch.int64).to("meta"),
    }
    heads = getattr(model, "roi_heads", None)
    if getattr(heads, "mask_predictor", None) is not None:
        target["masks"] = torch.empty((OBJECTS, height, width), dtype=torch.uint8, device="meta")
    predictor = getattr(heads, "keypoint_predictor", None)
    if predictor is not None:
        target["keypoints"] = _points(height, width, predictor.kps_score_lowres.out_channels).to("meta")
    return target


def _boxes(height: int, width: int) -> Tensor:
    """Return a tensor of `OBJECTS` boxes (left, top, right, bottom) along the image's diagonal.

    Their sides are an eighth to a half of the image's sides, before they are cut at its edges.
    """
    step = torch.arange(1, OBJECTS + 1) / (OBJECTS + 1)
    middle = torch.stack((step * width, step * height), 1)
    half = middle.new_tensor([width, height]) * (1 + torch.arange(OBJECTS) % 4)[:, None] / 16
    edge = middle.new_tensor([width - 1, height - 1])
    return torch.cat(((middle - half).clamp(min=0), torch.minimum(middle + half, edge)), 1)


def _points(height: int, width: int, points: int) -> Tensor:
    """Return `points` keypoints for each object, as (x, y, visibility).

    The shape is `OBJECTS` x points x 3. All keypoints are visible, in the middle of the object's box.
    """
    boxes = _boxes(height, width)
    middle = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2
    return torch.cat((middle, torch.ones(OBJECTS, 1, 1)), 2).repeat(1, points, 1)
