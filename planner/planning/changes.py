"""List the changes to a job that may save GPU memory, each with its cost."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner._support.versions import installed_version
from planner.allocator import AllocatorConfig
from planner.jobs import (
    FUSED_OPTIMIZERS,
    Checkpoint,
    Compile,
    Job,
    Loss,
    MemoryFormat,
    Mode,
    Offload,
    Optimizer,
    OptimizerImpl,
    Precision,
    Quantize,
    ZeroGrad,
    default_impl,
    split_model,
    trains_itself,
)

SMALLER_BATCHES = "accumulation"  # the group that shrinks what other changes leave by the same share
ACCUMULATIONS = (2, 4, 8, 16, 32, 64)
OPTIMIZERS = "optimizer"  # the group of changes to the optimizer or its implementation


class TrainingConfig(Struct, frozen=True):
    """A job at one batch size under one configuration of the allocator."""

    job: Job
    batch: int  # of one micro-batch, if the job accumulates
    config: AllocatorConfig


class Change(Struct, frozen=True):
    """A change to a job that may save memory: its option, its cost, and the function that applies it."""

    name: str  # the option as the command line takes it
    cost: str  # in time, numbers or comfort, as text
    rank: int  # 0 costs nothing; a higher rank changes more about the training
    group: str  # at most one change of a group is made
    apply: Callable[[TrainingConfig], TrainingConfig]
    is_slow: bool = False  # whether trying it takes long, so that it is never combined with other changes


def changes_for(training: TrainingConfig, capability: tuple[int, int]) -> tuple[Change, ...]:
    """Return the changes that a job allows on a GPU and that may save memory, the mildest first.

    `capability` is the compute capability of the GPU.
    """
    changes = [*_of_allocator(training)]
    if training.job.loop.mode is not Mode.STEP:  # the model's own step decides its precision itself
        changes += _of_numbers(training.job, capability)
    if training.job.loop.mode is Mode.INFER:
        changes += _of_autoencoder(training)
    if training.job.loop.mode is Mode.TRAIN:
        changes += [*_of_gradients(training.job), *_of_work(training), *_of_adaptation(training.job)]
        if not trains_itself(training.job):
            changes += _of_optimizer(training.job)
    return tuple(sorted(changes, key=lambda change: change.rank))


def apply_all(training: TrainingConfig, changes: tuple[Change, ...]) -> TrainingConfig:
    """Return the training configuration after applying the changes in order."""
    for change in changes:
        training = change.apply(training)
    return training


def change_fields(
    name: str,
    cost: str,
    rank: int,
    group: str,
    *,
    batch: int | None = None,
    config: AllocatorConfig | None = None,
    is_slow: bool = False,
    **fields: object,
) -> Change:
    """Return a `Change` that sets fields of the job, and the batch size and allocator options if given."""

    def apply(training: TrainingConfig) -> TrainingConfig:
        return TrainingConfig(
            training.job.replace(**fields), batch or training.batch, config or training.config
        )

    return Change(name, cost, rank, group, apply, is_slow)


def _of_allocator(training: TrainingConfig) -> Iterator[Change]:
    if not training.config.expandable_segments:
        cost = "nothing in numbers or time; Linux only, set PYTORCH_ALLOC_CONF before the process starts"
        config = replace(training.config, expandable_segments=True)
        yield change_fields("--alloc-conf expandable_segments:True", cost, 0, "allocator", config=config)


def _of_gradients(job: Job) -> Iterator[Change]:
    if job.loop.keep_grads or job.loop.zero_grad is ZeroGrad.BEFORE_BACKWARD:
        cost = "nothing: zero_grad(set_to_none=True), called before the forward pass"
        zero_grad = ZeroGrad.BEFORE_FORWARD
        yield change_fields(
            "--zero-grad before-forward", cost, 0, "gradients", keep_grads=False, zero_grad=zero_grad
        )


def _of_numbers(job: Job, capability: tuple[int, int]) -> Iterator[Change]:
    trains = job.loop.mode is Mode.TRAIN
    if job.loop.precision is Precision.FP32 and capability >= (8, 0):
        cost = "usually faster; activations with 8 bits of mantissa"
        yield change_fields("--precision amp-bf16", cost, 2, "precision", precision=Precision.AMP_BF16)
    elif job.loop.precision is Precision.FP32 and capability >= (7, 0):
        cost = "usually faster; activations in half precision, the loss has to be scaled"
        precision = Precision.AMP_FP16
        yield change_fields(
            "--precision amp-fp16", cost, 2, "precision", precision=precision, grad_scaler=trains
        )
    if job.loop.precision in (Precision.FP32, Precision.AMP_BF16, Precision.AMP_FP16) and capability >= (
        8,
        0,
    ):
        training = "small updates of the weights are lost; " if trains else ""
        cost = f"weights in half precision too: {training}check the results"
        precision = Precision.BF16
        yield change_fields("--precision bf16", cost, 6, "precision", precision=precision, grad_scaler=False)
    pictures = any(len(spec.shape) >= 3 for spec in job.samples.inputs)
    if pictures and job.model.memory_format is MemoryFormat.CONTIGUOUS:
        cost = (
            "nothing in numbers; faster convolutions on tensor cores, copies where layers want another order"
        )
        layout = MemoryFormat.CHANNELS_LAST
        yield change_fields("--memory-format channels_last", cost, 1, "layout", memory_format=layout)


def _of_optimizer(job: Job) -> Iterator[Change]:
    if job.loop.optimizer_impl is OptimizerImpl.FOREACH and job.loop.optimizer in FUSED_OPTIMIZERS:
        cost = "nothing: one kernel for all parameters, usually a little faster"
        implementation = OptimizerImpl.FUSED
        yield change_fields("--optimizer-impl fused", cost, 0, OPTIMIZERS, optimizer_impl=implementation)
    if job.loop.optimizer_impl is OptimizerImpl.FOREACH:
        cost = "slower steps where the parameters are many and small"
        implementation = OptimizerImpl.FOR_LOOP
        yield change_fields("--optimizer-impl for-loop", cost, 1, OPTIMIZERS, optimizer_impl=implementation)
    if job.loop.optimizer in (Optimizer.ADAM, Optimizer.ADAMW):
        cost = "another optimizer with almost no state: learning rates have to be found again"
        yield _of_other_optimizer(job, Optimizer.ADAFACTOR, cost, 5)
        if installed_version("bitsandbytes"):
            name = f"bitsandbytes.optim.{'AdamW' if job.loop.optimizer is Optimizer.ADAMW else 'Adam'}8bit"
            cost = "the optimizer's state in 8 bits: check the results"
            yield _of_other_optimizer(job, name, cost, 4)


def _of_other_optimizer(job: Job, optimizer: Optimizer | str, cost: str, rank: int) -> Change:
    """Return the change to `optimizer`, without the arguments of the job's optimizer.

    The implementation becomes the default of `optimizer` if the job has a default or a fused implementation.
    """
    name, implementation = f"--optimizer {optimizer}", job.loop.optimizer_impl
    other = default_impl(optimizer)
    if implementation is OptimizerImpl.FUSED:
        name += f" --optimizer-impl {other}"
    if implementation is OptimizerImpl.FUSED or implementation is default_impl(job.loop.optimizer):
        implementation = other
    fields: dict[str, Any] = {"optimizer_args": (), "optimizer_impl": implementation}
    return change_fields(name, cost, rank, OPTIMIZERS, optimizer=optimizer, **fields)


def _of_adaptation(job: Job) -> Iterator[Change]:
    """Yield the changes to Liger, LoRA and 4-bit weights that a transformers model allows.

    The libraries of the changes must be installed.
    """
    if split_model(job.model.origin).source != "hf":
        return
    if not job.model.liger and job.loop.loss is Loss.OUTPUT and installed_version("liger-kernel"):
        cost = "nothing in numbers but rounding; usually faster: Liger's kernels, the logits in chunks"
        yield change_fields("--liger", cost, 1, "kernels", liger=True)
    has_quantizer = bool(installed_version("bitsandbytes"))
    if not job.model.peft and job.model.quantize is Quantize.NONE and installed_version("peft"):
        cost = "another training: adapters of rank 8 in place of all weights"
        yield change_fields("--peft lora", cost, 7, "adapters", peft="lora")
        if has_quantizer:
            cost = "another training: adapters of rank 8 with weights in 4 bits, which take time to unpack"
            yield change_fields(
                "--peft lora --quantize nf4", cost, 8, "adapters", peft="lora", quantize=Quantize.NF4
            )
    elif job.model.peft and job.model.quantize is Quantize.NONE and has_quantizer:
        cost = "frozen weights in 4 bits, which take time to unpack: check the results"
        yield change_fields("--quantize nf4", cost, 5, "adapters", quantize=Quantize.NF4)


def _of_autoencoder(training: TrainingConfig) -> Iterator[Change]:
    """Yield the changes that make a diffusers autoencoder process one image or one tile at a time.

    A model that does not support one of the changes refuses it when the model is built.
    """
    job = training.job
    name = split_model(job.model.origin)
    if name.source != "diffusers" or not name.name.startswith("Autoencoder"):
        return
    costs = {
        "enable_slicing": (1, "nothing in numbers; one image after the other"),
        "enable_tiling": (4, "images in overlapping tiles that are blended: check the results; more time"),
    }
    if training.batch == 1:
        del costs["enable_slicing"]
    for switch, (rank, cost) in costs.items():
        if not dict(job.model.args).get(switch):
            given = tuple(pair for pair in job.model.args if pair[0] != switch)
            arguments = (*given, (switch, True))
            yield change_fields(f"--model-arg {switch}=true", cost, rank, switch, model_args=arguments)


def _of_work(training: TrainingConfig) -> Iterator[Change]:
    job = training.job
    is_kept = job.loop.checkpoint is Checkpoint.NONE and job.loop.offload is Offload.NONE
    is_plain = job.model.compile is Compile.NONE and is_kept and not trains_itself(job)
    if is_plain and not (
        job.sharding.ddp or job.samples.dataset_size or job.environment.torch
    ):  # compilation is not planned with these
        cost = "compilation takes a while at the first step, and for each new shape; usually faster then"
        yield change_fields("--compile", cost, 2, "checkpoint", is_slow=True, compile=Compile.DEFAULT)
    if job.loop.checkpoint is Checkpoint.NONE and job.model.compile is Compile.NONE:
        cost = "each block's forward pass runs twice: about a third more time in training"
        yield change_fields("--checkpoint blocks", cost, 3, "checkpoint", checkpoint=Checkpoint.BLOCKS)
    is_alone = job.model.compile is Compile.NONE and not (
        job.sharding.fsdp or job.sharding.tp or job.sharding.deepspeed
    )
    if job.loop.offload is Offload.NONE and is_alone:
        cost = "what the backward pass needs goes to pinned memory of the CPU and back: slower steps"
        yield change_fields("--offload activations", cost, 5, "offload", offload=Offload.ACTIVATIONS)
    for parts in ACCUMULATIONS:
        if training.batch % parts == 0 and training.batch > parts:
            micro, total = training.batch // parts, parts * training.job.loop.accumulate
            cost = f"batch norm, if any, sees {micro} samples at a time; small kernels may leave the GPU idle"
            name = f"--accumulate {total} --batch {micro}"
            yield change_fields(name, cost, 4, SMALLER_BATCHES, batch=micro, accumulate=total)
