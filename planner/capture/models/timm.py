"""Find models of timm, and complete their jobs.

Inputs follow the configuration of timm's pretrained weights.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from planner.capture.models.libraries import import_library, unknown_name
from planner.jobs import Job, Loss, TensorSpec

_LABEL = TensorSpec((), "int64")
_USUAL = (3, 224, 224)


def find_timm(name: str) -> Callable[..., object]:
    """Return the constructor of a timm model without pretrained weights.

    The name may include the tag of its weights. Raises UsageError for a name that timm does not list.
    """
    return partial(_import_timm(name).create_model, name, pretrained=False)


def complete_timm(job: Job, name: str, arguments: dict[str, Any]) -> Job:
    """Return the job with an image as input if it has none, and a sum as the loss if the model has no head.

    The image has the size of timm's pretrained weights. The constructor's `arguments` may change the image
    size. Only a cross-entropy loss becomes the sum, of the features that the model returns.
    """
    config = _import_timm(name).get_pretrained_cfg(name)
    headless = config is not None and config.num_classes == 0 and not arguments.get("num_classes")
    if headless and job.loop.loss is Loss.CROSS_ENTROPY and job.samples.target in (_LABEL, None):
        job = job.replace(loss=Loss.SUM, target=None)
    if job.samples.inputs:
        return job
    channels, height, width = getattr(config, "input_size", None) or _USUAL
    channels = arguments.get("in_chans", channels)
    size = arguments.get("img_size", (height, width))
    height, width = (size, size) if isinstance(size, int) else size
    return job.replace(inputs=(TensorSpec((channels, height, width)),))


def _import_timm(name: str) -> ModuleType:
    """Import and return timm. Raises UsageError if it has no model of this name."""
    timm = import_library("timm", extra="timm")
    if not timm.is_model(name):
        raise unknown_name("timm", name, timm.list_models())
    return timm
