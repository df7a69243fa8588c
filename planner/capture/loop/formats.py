"""Types and memory formats of what a loop feeds its model, in the precision and layout of the job.

Decided here: the data come in the model's own type and layout, as a loader or a collate function prepares
them, so that a batch is one copy to the device. What a job's inputs say themselves counts: only float32, the
type of whoever names none, follows the model.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from planner.jobs import Job, MemoryFormat, Precision, TensorSpec

PURE = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}


def with_own_types(job: Job) -> Job:
    """The job with its float32 inputs and targets in the type of a model that is all of half precision."""
    if job.precision not in PURE:
        return job
    kind = PURE[job.precision]

    def typed(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=kind) if spec.dtype == "float32" else spec

    target = None if job.target is None else typed(job.target)
    inputs, targets = tuple(map(typed, job.inputs)), tuple(map(typed, job.targets))
    return replace(job, inputs=inputs, target=target, targets=targets)


def format_of(job: Job, shape: Sequence[int], dtype: torch.dtype) -> torch.memory_format:
    """The memory format of a tensor of this shape, the batch dimension included.

    Channels last is for floating-point tensors of images (4 dimensions) and volumes (5); torch knows none
    for others.
    """
    if job.memory_format is MemoryFormat.CHANNELS_LAST and dtype.is_floating_point:
        if len(shape) == 4:
            return torch.channels_last
        if len(shape) == 5:
            return torch.channels_last_3d
    return torch.contiguous_format
