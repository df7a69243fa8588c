"""Describe jobs, operators and growing memory in words."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from planner.hardware import MIB
from planner.jobs import (
    Arguments,
    Checkpoint,
    ClipGradients,
    Compile,
    FsdpArguments,
    Job,
    Loss,
    MemoryFormat,
    Mode,
    Offload,
    OptimizerImpl,
    Precision,
    Quantize,
    argument_texts,
    deepspeed_stage,
)
from planner.program import STREAM_POOL, GrowingSite, Growth, Phase
from planner.report.document import Entry
from planner.report.units import mib

if TYPE_CHECKING:  # only annotations need these imports
    from planner.allocator import Failure
    from planner.planning import PeakLocation, StepLimit

_MAX_SITES = 3  # most sites of growing memory in a sentence
_PHASES = {
    Phase.INPUTS: "copying the batch to the GPU",
    Phase.FORWARD: "forward pass",
    Phase.BACKWARD: "backward pass",
    Phase.EVALUATION: "evaluation between the steps",
    Phase.GATHERING: "gathering weights to save them",
}


def job_entry(job: Job) -> Entry:
    """Return the entry `Job` of a report, which describes the job."""
    return Entry("Job", describe_job(job))


def describe_job(job: Job) -> str:
    """Describe a job in one line: its model, training loop or inference, and sample sizes."""
    given = ", ".join(argument_texts(job.model.args))
    model = f"{job.model.name} = {job.model.source}" if job.model.source else job.model.name
    targets = job.samples.targets if job.samples.target is None else (job.samples.target,)
    target = f", target {' and '.join(map(str, targets))}" if targets else ""
    sample = f"one sample: input {' and '.join(map(str, job.samples.inputs))}{target}"
    return f"{model}{f'({given})' if given else ''}; {describe_loop(job)}; {sample}"


def describe_loop(job: Job) -> str:
    """Describe how a job runs: its mode, optimizer, loss and non-default options."""
    if job.loop.mode is Mode.INFER:
        return ", ".join(("inference", *_numerics(job)))
    if job.loop.mode is Mode.GENERATE:
        return ", ".join((f"generation of {job.loop.new_tokens} tokens", *_numerics(job)))
    if job.loop.mode is Mode.FORWARD:
        return ", ".join(("forward pass with gradients recorded", *_numerics(job)))
    if job.loop.mode is Mode.STEP:
        return ", ".join(("training by its own step", *_numerics(job)))
    how = "" if job.loop.optimizer_impl is OptimizerImpl.FOREACH else f" ({job.loop.optimizer_impl})"
    if job.loop.loss is Loss.TRAINING_STEP:
        own = "training by its training_step and configure_optimizers"
        return ", ".join((own, *_numerics(job), *_recipe(job)))
    with_args = ", ".join(argument_texts(job.loop.optimizer_args))
    optimizer = f"{job.loop.optimizer}({with_args})" if with_args else job.loop.optimizer
    parts = (f"training with {optimizer}{how}", f"{job.loop.loss} loss", *_numerics(job), *_recipe(job))
    return ", ".join(parts)


def _numerics(job: Job) -> list[str]:
    """Return a text for each non-default option of precision, model or libraries."""
    environment, model = job.environment, job.model
    parts = {
        str(job.loop.precision): job.loop.precision is not Precision.FP32,
        "gradient scaling": job.loop.grad_scaler,
        str(model.memory_format): model.memory_format is not MemoryFormat.CONTIGUOUS,
        "cudnn.benchmark": environment.cudnn_benchmark,
        f"CUBLAS_WORKSPACE_CONFIG={environment.cublas_workspace_config}": environment.cublas_workspace_config,
        f"torch {environment.torch}": environment.torch,
        f"{model.quantize} weights{_given(model.quantize_arg)}": model.quantize is not Quantize.NONE,
        "Liger's kernels": model.liger,
        f"{model.peft} adapters{_given(model.peft_arg)}": model.peft,
        "torch.compile": model.compile is not Compile.NONE,
    }
    return [text for text, is_so in parts.items() if is_so]


def _recipe(job: Job) -> list[str]:
    """Return a text for each non-default option of the training recipe.

    They are the options on the loop, samples, sharding and freezing.
    """
    batches = f" of batches of {job.loop.eval_batch:,}" if job.loop.eval_batch else ""
    batches += f" with input {' and '.join(job.loop.eval_input)}" if job.loop.eval_input else ""
    parts = {
        f"checkpointed {job.loop.checkpoint}": job.loop.checkpoint is not Checkpoint.NONE,
        f"{job.loop.offload} offloaded to the CPU": job.loop.offload is not Offload.NONE,
        f"{job.loop.accumulate} micro-batches a step": job.loop.accumulate > 1,
        f"gradients clipped by {job.loop.clip_gradients}": job.loop.clip_gradients is not ClipGradients.NONE,
        "output freed before the backward pass": job.loop.drop_output,
        "moving average of the weights": job.loop.ema,
        f"evaluation{batches} between the steps": job.loop.evaluate,
        f"epochs of {job.samples.dataset_size:,} samples": job.samples.dataset_size,
        f"{job.samples.lengths} lengths": job.samples.lengths is not None,
        f"gradient buckets{' as views' if job.sharding.ddp_bucket_view else ''}": job.sharding.ddp,
        f"FSDP over {job.sharding.fsdp} ranks{_given(job.sharding.fsdp_arg)}": job.sharding.fsdp,
        f"tensor parallel over {job.sharding.tp} ranks": job.sharding.tp,
        f"rank {job.sharding.rank} of {job.sharding.world_size}": job.sharding.world_size
        and not job.sharding.deepspeed,
        f"DeepSpeed ZeRO {deepspeed_stage(job)} over {job.sharding.world_size} ranks": job.sharding.deepspeed,
        f"frozen: {' '.join(job.model.freeze)}": job.model.freeze,
        f"trained only: {' '.join(job.model.train_only)}": job.model.train_only,
        "the rest of the weights in float32": job.model.prepare_kbit,
    }
    return [text for text, is_so in parts.items() if is_so]


def _given(arguments: Arguments | FsdpArguments) -> str:
    texts = argument_texts(arguments)
    return f" ({', '.join(texts)})" if texts else ""


def place_text(place: "Failure | PeakLocation") -> str:
    """Return text on where memory was requested: the step, phase, module and operator, if known."""
    return ", ".join(_place(place))


def _place(place: "Failure | PeakLocation") -> Iterator[str]:
    if place.phase is Phase.SETUP:
        yield "moving the model to the GPU"
    else:
        yield f"step {place.step}"
        yield _PHASES.get(place.phase, str(place.phase))
    if place.module:
        yield f"module {place.module}"
    if place.op and place.phase not in (Phase.SETUP, Phase.INPUTS):
        yield short_op(place.op)


def short_op(op: str) -> str:
    """Return the short name of an operator, such as `convolution` for `aten.convolution.default`."""
    return op.removeprefix("aten.").removesuffix(".default")


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text, such as `64x3x224x224`, or `scalar` for a shape without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def growth_text(growth: Growth, limit: "StepLimit | None") -> str:
    """Return a sentence on how much memory grows per step and why.

    If `limit` is not None, it has the number of steps that fit.
    """
    made = "; ".join(_site_text(site) for site in growth.sites[:_MAX_SITES])
    more = len(growth.sites) - _MAX_SITES
    others = f" and {more} other place" + "s" * (more > 1) if more > 0 else ""
    held = (
        ", held by reference cycles until Python's garbage collector runs (it is off in the trace)"
        if growth.is_garbage
        else ""
    )
    text = (
        f"memory grows: each step keeps {size_text(growth.bytes_per_step)} more, made by {made}{others}{held}"
        f"; the answer is for {growth.steps} steps"
    )
    if limit is None:
        return text if growth.last_step is None else f"{text}: {_end_text(growth.last_step)}"
    steps = f"{'' if limit.is_exact else 'about '}{limit.steps:,} step" + "s" * (limit.steps != 1)
    return f"{text}: after {steps} it no longer fits (--steps N plans for N)"


def _end_text(last_step: int) -> str:
    return (
        f"until step {last_step} (--steps {last_step} plans for all of it), since each step makes a "
        f"stream, and after {STREAM_POOL} torch gives the first again"
    )


def size_text(size_bytes: int) -> str:
    """Return a size as text in MiB, or in bytes if it is below 0.1 MiB."""
    return f"{mib(size_bytes, 1):,} MiB" if size_bytes >= MIB // 10 else f"{size_bytes:,} bytes"


def _site_text(one: GrowingSite) -> str:
    where = f"module {one.site.module}" if one.site.module else "code outside of submodules"
    source = f", {one.source.source}" if one.source is not None and one.source.source else ""
    return f"{where} ({short_op(one.site.op)}{source})"
