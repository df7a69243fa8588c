"""Apply a job's precision and memory format to its model, batches and loop.

Batches have the dtype and layout of the model, as if a loader or a collate function prepared them, so that
each tensor is copied to the device once. Other dtypes than float32, the default, are kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn, optim
from torch.amp import GradScaler

from planner.capture.loop.runtime import LoopRuntime
from planner.capture.patching import patched
from planner.jobs import Job, MemoryFormat, Precision, TensorSpec, model_precision

_AUTOCAST = {Precision.AMP_FP16: torch.float16, Precision.AMP_BF16: torch.bfloat16}
_CONVERTED = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}  # the model itself


def convert_model(model: nn.Module, job: Job) -> nn.Module:
    """Convert the model in place to the job's half precision and memory format, if it has them.

    The model stays on its device. Equals `model.half()` or `model.bfloat16()`, and
    `model.to(memory_format=torch.channels_last)`, which applies to weights of 4 dimensions. Weights of 5
    dimensions get `channels_last_3d` as well, which `Module.to` cannot do in the same call.
    """
    if job.loop.precision in _CONVERTED:
        model = model.to(getattr(torch, _CONVERTED[job.loop.precision]))
    if job.model.memory_format is MemoryFormat.CHANNELS_LAST:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() in (4, 5):
                tensor.data = tensor.data.to(memory_format=format_of(job, tensor.shape, tensor.dtype))
    return model


def convert_inputs(job: Job) -> Job:
    """Return the job with its float32 inputs and targets in the model's half precision, if it has one."""
    precision = model_precision(job)
    if precision not in _CONVERTED:
        return job

    def convert(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=_CONVERTED[precision]) if spec.dtype == "float32" else spec

    inputs, targets = (tuple(map(convert, specs)) for specs in (job.samples.inputs, job.samples.targets))
    target = None if job.samples.target is None else convert(job.samples.target)
    return job.replace(inputs=inputs, target=target, targets=targets)


def format_of(job: Job, shape: Sequence[int], dtype: torch.dtype) -> torch.memory_format:
    """Return channels last for a float tensor of 4 or 5 dimensions if the job asks for it, else contiguous.

    The tensor is a model's weight, or part of a batch, whose shape includes the batch dimension.
    """
    is_last = job.model.memory_format is MemoryFormat.CHANNELS_LAST and dtype.is_floating_point
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if is_last else {}
    return formats.get(len(shape), torch.contiguous_format)


class MetaScaler(GradScaler):
    """A `torch.amp.GradScaler` on the meta device that takes every optimizer step.

    No gradient counts as infinite. Its tensors are torch's: the scale and the growth tracker since the first
    step, and in each step the inverse of the scale and the flag for infinite gradients
    (torch/amp/grad_scaler.py).
    """

    def __init__(self) -> None:
        super().__init__(device="meta")

    def _maybe_opt_step(
        self, optimizer: optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        return _take_step(self, optimizer, optimizer_state, *args, **kwargs)


def _take_step(
    scaler: GradScaler, optimizer: optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
) -> float | None:
    loss: float | None = optimizer.step(*args, **kwargs)
    return loss


@contextmanager
def take_all_steps() -> Iterator[None]:
    """Make each `GradScaler` of user code take all optimizer steps inside the context.

    Gradients are not read.
    """
    with patched(GradScaler, "_maybe_opt_step", _take_step):
        yield


def meta_runtime(job: Job) -> LoopRuntime:
    """Return the autocast and gradient scaler of a job's loop in a capture.

    The autocast works only inside `cuda_semantics`.
    """
    return _runtime(job, MetaScaler() if job.loop.grad_scaler else None)


def cuda_runtime(job: Job) -> LoopRuntime:
    """Return the autocast and gradient scaler of a job's loop on a real GPU.

    Losses are not scaled up: at the default scale the first gradients overflow, and the optimizer steps that
    make the optimizer's state would be skipped.
    """
    return _runtime(job, GradScaler("cuda", init_scale=1.0) if job.loop.grad_scaler else None)


def _runtime(job: Job, scaler: GradScaler | None) -> LoopRuntime:
    if job.loop.precision not in _AUTOCAST:
        return LoopRuntime(scaler=scaler)
    return LoopRuntime(partial(torch.autocast, "cuda", dtype=_AUTOCAST[job.loop.precision]), scaler)
