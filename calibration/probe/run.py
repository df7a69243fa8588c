"""Run a job's steps with real tensors on a device.

`planner.capture` traces the same loop. The order follows a training script: the model is built on the CPU
with its initial values (tables of indices must hold valid values) and moved, the optimizer is created over
the moved parameters, and each batch is copied from the CPU. `run_loop` runs the options of the loop; of
DistributedDataParallel it runs only the buckets, without a process group, even on a GPU.
"""

from collections.abc import Callable, Mapping
from operator import call
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.capture import (
    PhaseHook,
    attach_adapters,
    build_named,
    complete_by_library,
    construct_model,
    convert_inputs,
    convert_model,
    cuda_runtime,
    find_constructor,
    format_of,
    freeze_parameters,
    is_padded,
    known_contents,
    prepare_for_kbit_training,
    quantize_linears,
    run_loop,
)
from planner.errors import ModelError
from planner.jobs import Job, Mode, Quantize, TensorSpec, batch_of_specs, trains_itself
from planner.program import Phase

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]
Build = Callable[[Job], nn.Module]


def build_real_model(job: Job) -> nn.Module:
    """Return the job's model on the CPU with its initial values. Raises UsageError or ModelError."""
    return construct_model(job, find_constructor(job), call)


def run_real(job: Job, batch: int, device: str, on_phase: PhaseHook, build: Build = build_real_model) -> None:
    """Run the job's steps on the device.

    `on_phase` is also called with `SETUP` before the model is moved. No tensors stay on the device
    afterwards. Raises ModelError for a job that has its own training step or uses --liger, and the errors of
    torch if the steps fail.
    """
    if trains_itself(job):
        raise ModelError(
            f"{job.model.name}: its own training step is planned and not measured here; run it as it is"
        )
    if job.model.liger:
        raise ModelError(f"{job.model.name}: --liger is planned and not measured here; remove it")
    torch.manual_seed(0)
    job = complete_by_library(job)
    model = quantize_linears(convert_model(build(job), job), job)
    converted = convert_inputs(job)
    host = host_batch(converted, batch, known_contents(model, job, batch))
    if job.model.quantize is not Quantize.NONE:  # scripts adapt a quantized model once it is on the GPU
        on_phase(0, Phase.SETUP)
        model.to(device)
    if job.model.prepare_kbit:
        prepare_for_kbit_training(model)
    model = attach_adapters(model, job, call)
    freeze_parameters(model, job)
    if job.model.quantize is Quantize.NONE:
        on_phase(0, Phase.SETUP)
    model.to(device)
    optimizer = None
    if job.loop.mode is Mode.TRAIN:
        optimizer = build_named(job, model, model.parameters())
    seen = host
    if job.loop.eval_batch:
        seen = host_batch(converted, job.loop.eval_batch, known_contents(model, job, job.loop.eval_batch))
    run_loop(
        model,
        job,
        lambda: _copy(host, device),
        optimizer,
        on_phase,
        cuda_runtime(job),
        lambda: _copy(seen, device),
    )


def host_batch(job: Job, batch: int, known: Mapping[str, Any] = MappingProxyType({})) -> Batch:
    """Return a batch on the CPU whose values are valid for every model.

    It has positional inputs, keyword inputs and a target. Whole numbers are 0, which is a valid token, class
    and position everywhere, except in masks, which are 1 so that they mask nothing. If batches are padded,
    the first sample of an attention mask is one token shorter, since a mask that masks nothing is dropped by
    models. A single floating-point target is between 0 and 1, as a probability is. Inputs whose keyword is in
    `known` have the value in `known`.
    """

    def like(spec: TensorSpec, draw: Callable[..., Tensor]) -> Tensor:
        if spec.keyword is not None and spec.keyword in known:
            return known[spec.keyword]  # type: ignore[no-any-return]
        dtype = getattr(torch, spec.dtype)
        shape = (batch, *spec.shape)
        if dtype.is_floating_point or dtype.is_complex:
            return draw(shape, dtype=dtype).to(memory_format=format_of(job, shape, dtype))
        filled = torch.full(shape, "mask" in (spec.keyword or ""), dtype=dtype)
        if spec.keyword == "attention_mask" and is_padded(job):
            filled[0, -1:] = 0
        return filled

    args, kwargs, target = batch_of_specs(
        job, lambda spec: like(spec, torch.rand if spec is job.samples.target else torch.randn)
    )
    return args, kwargs | {name: known[name] for name in known if name not in kwargs}, target


def _copy(host: Batch, device: str) -> Batch:
    # `copy=True` makes a new tensor on the CPU too, on which tests run this; on a GPU it changes nothing.
    copied: Batch = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), host)
    return copied
