"""Precision and memory format of a job: what it makes of the model and of the loop's machine."""

import torch
from torch import nn

from planner.errors import UsageError
from planner.job import Job, MemoryFormat, Precision
from planner.trace.step import Machine

_PURE = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def convert_model(model: nn.Module, job: Job) -> nn.Module:
    """The model in the job's own precision and memory format, as `model.half()` and `model.to` convert it."""
    if job.precision in _PURE:
        model = model.to(_PURE[job.precision])
    if job.memory_format is MemoryFormat.CHANNELS_LAST:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def meta_machine(job: Job) -> Machine:
    """The machine of a trace. Raises UsageError for a precision that is not modelled."""
    if job.precision in (Precision.AMP_FP16, Precision.AMP_BF16):
        raise UsageError(f"--precision {job.precision}: autocast is not modelled yet; use fp32, fp16 or bf16")
    return Machine()


def cuda_machine(job: Job) -> Machine:
    """The machine of a run on a GPU."""
    if job.precision in (Precision.AMP_FP16, Precision.AMP_BF16):
        raise UsageError(f"--precision {job.precision}: autocast is not modelled yet; use fp32, fp16 or bf16")
    return Machine()
