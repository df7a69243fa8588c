"""Precision and memory format of a job: what it makes of the model and of the loop's machine."""

from functools import partial

import torch
from torch import nn

from planner.capture.loop.formats import PURE, format_of
from planner.capture.loop.runtime import Machine, Scaler
from planner.capture.loop.scaler import MetaScaler
from planner.jobs import Job, MemoryFormat, Precision

_AUTOCAST = {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16}


def convert_model(model: nn.Module, job: Job) -> nn.Module:
    """The model in the job's own precision and memory format, in place, wherever its tensors are.

    As `model.half()` or `model.bfloat16()`, and `model.to(memory_format=torch.channels_last)`, which
    concerns weights of 4 dimensions; weights of 5 get `channels_last_3d`, which `Module.to` has no one call
    for.
    """
    if job.precision in PURE:
        model = model.to(getattr(torch, PURE[job.precision]))
    if job.memory_format is MemoryFormat.CHANNELS_LAST:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() in (4, 5):
                tensor.data = tensor.data.to(memory_format=format_of(job, tensor.shape, tensor.dtype))
    return model


def meta_machine(job: Job) -> Machine:
    """The machine of a trace; its regions count while `cuda_semantics` is open."""
    return _machine(job, MetaScaler() if job.grad_scaler else None)


def cuda_machine(job: Job) -> Machine:
    """The machine of a run on a GPU."""
    return _machine(job, torch.amp.GradScaler("cuda") if job.grad_scaler else None)


def _machine(job: Job, scaler: Scaler | None) -> Machine:
    if job.precision not in _AUTOCAST:
        return Machine(scaler=scaler)
    return Machine(partial(torch.autocast, "cuda", dtype=_AUTOCAST[job.precision]), scaler)
