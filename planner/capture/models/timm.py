"""Complete a job of timm with the image and the loss of its model, from the configuration of its weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.jobs import Job, Loss, TensorSpec

_LABEL = TensorSpec((), "int64")
_USUAL = (3, 224, 224)


def complete_inputs(job: Job, config: Any, arguments: Mapping[str, Any]) -> Job:
    """Return the job with the image that the model was trained on, unless it names its inputs.

    `config` is a `timm.models.PretrainedCfg` or None, `arguments` are the constructor's: they may change the
    image. A model without a head returns features, whose sum is the loss.
    """
    headless = config is not None and config.num_classes == 0 and not arguments.get("num_classes")
    if headless and job.loss is Loss.CROSS_ENTROPY and job.target in (_LABEL, None):
        job = replace(job, loss=Loss.SUM, target=None)
    if job.inputs:
        return job
    channels, height, width = getattr(config, "input_size", None) or _USUAL
    channels = arguments.get("in_chans", channels)
    size = arguments.get("img_size", (height, width))
    height, width = (size, size) if isinstance(size, int) else size
    return replace(job, inputs=(TensorSpec((channels, height, width)),))
