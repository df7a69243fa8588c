"""Changes to a recipe that save GPU memory: what each one does to the job, and what it costs, in words."""

import math
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import AllocatorConfig
from planner.jobs import (
    FUSED_OPTIMIZERS,
    Checkpoint,
    Job,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    ZeroGrad,
)

LARGEST_ACCUMULATION = 64


class Recipe(Struct, frozen=True):
    """A job at one batch size under one configuration of the allocator."""

    job: Job
    batch: int  # of one micro-batch, where the job accumulates
    config: AllocatorConfig


class Change(Struct, frozen=True):
    """One thing to change."""

    name: str  # the option as the command line takes it
    cost: str  # what it costs in time, numbers or comfort
    rank: int  # 0 costs nothing; the more, the more it changes about the training
    group: str  # of several changes of one group at most one is made
    apply: Callable[[Recipe], Recipe]


def changes_for(recipe: Recipe, capability: tuple[int, int]) -> tuple[Change, ...]:
    """Return all changes that make sense for the recipe on a GPU of this compute capability, the mildest
    first.
    """
    found = [*_of_allocator(recipe), *_of_numbers(recipe, capability)]
    if recipe.job.mode is Mode.TRAIN:
        found += [*_of_gradients(recipe.job), *_of_optimizer(recipe.job), *_of_work(recipe)]
    return tuple(sorted(found, key=lambda change: change.rank))


def apply_all(recipe: Recipe, changes: tuple[Change, ...]) -> Recipe:
    """Return the recipe with these changes made, in their order."""
    for change in changes:
        recipe = change.apply(recipe)
    return recipe


def _change(name: str, cost: str, rank: int, group: str, **fields: object) -> Change:
    """Return a change of fields of the job."""

    def apply(recipe: Recipe) -> Recipe:
        return replace(recipe, job=replace(recipe.job, **fields))

    return Change(name, cost, rank, group, apply)


def _of_allocator(recipe: Recipe) -> list[Change]:
    if recipe.config.expandable_segments:
        return []

    def expand(recipe: Recipe) -> Recipe:
        return replace(recipe, config=replace(recipe.config, expandable_segments=True))

    cost = "nothing in numbers or time; Linux only, set PYTORCH_ALLOC_CONF before the process starts"
    return [Change("--alloc-conf expandable_segments:True", cost, 0, "allocator", expand)]


def _of_gradients(job: Job) -> list[Change]:
    if not job.keep_grads and job.zero_grad is not ZeroGrad.BEFORE_BACKWARD:
        return []
    cost = "nothing: zero_grad(set_to_none=True), called before the forward pass"
    fields = {"keep_grads": False, "zero_grad": ZeroGrad.BEFORE_FORWARD}
    return [_change("--zero-grad before-forward", cost, 0, "gradients", **fields)]


def _of_numbers(recipe: Recipe, capability: tuple[int, int]) -> list[Change]:
    job, found = recipe.job, []
    if job.precision is Precision.FP32:
        if capability >= (8, 0):
            cost = "usually faster; activations with 8 bits of mantissa"
            name = "--precision amp-bf16"
            found.append(_change(name, cost, 2, "precision", precision=Precision.AMP_BF16))
        elif capability >= (7, 0):
            cost = "usually faster; activations in half precision, the loss has to be scaled"
            fields = {"precision": Precision.AMP_FP16, "grad_scaler": job.mode is Mode.TRAIN}
            found.append(_change("--precision amp-fp16", cost, 2, "precision", **fields))
    if job.precision in (Precision.FP32, Precision.AMP_BF16, Precision.AMP_FP16) and capability >= (8, 0):
        training = "small updates of the weights are lost; " if job.mode is Mode.TRAIN else ""
        cost = f"weights in half precision too: {training}check the results"
        fields = {"precision": Precision.BF16, "grad_scaler": False}
        found.append(_change("--precision bf16", cost, 6, "precision", **fields))
    pictures = any(len(spec.shape) >= 3 for spec in job.inputs)
    if pictures and job.memory_format is MemoryFormat.CONTIGUOUS:
        cost = (
            "nothing in numbers; faster convolutions on tensor cores, copies where layers want another order"
        )
        name = "--memory-format channels_last"
        found.append(_change(name, cost, 1, "layout", memory_format=MemoryFormat.CHANNELS_LAST))
    return found


def _of_optimizer(job: Job) -> list[Change]:
    found = []
    if job.optimizer_impl is OptimizerImpl.FOREACH:
        if job.optimizer in FUSED_OPTIMIZERS:
            cost = "nothing: one kernel for all parameters, usually a little faster"
            name = "--optimizer-impl fused"
            found.append(_change(name, cost, 0, "implementation", optimizer_impl=OptimizerImpl.FUSED))
        cost = "slower steps where the parameters are many and small"
        name = "--optimizer-impl for-loop"
        found.append(_change(name, cost, 1, "implementation", optimizer_impl=OptimizerImpl.FOR_LOOP))
    if job.optimizer in (Optimizer.ADAM, Optimizer.ADAMW):
        cost = "another optimizer with almost no state: learning rates have to be found anew"
        fields: dict[str, object] = {"optimizer": Optimizer.ADAFACTOR}
        if job.optimizer_impl is OptimizerImpl.FUSED:
            fields["optimizer_impl"] = OptimizerImpl.FOREACH
        found.append(_change("--optimizer adafactor", cost, 5, "optimizer", **fields))
    return found


def _of_work(recipe: Recipe) -> list[Change]:
    found = []
    if recipe.job.checkpoint is Checkpoint.NONE:
        cost = "each block's forward pass runs twice: about a third more time in training"
        found.append(_change("--checkpoint blocks", cost, 3, "checkpoint", checkpoint=Checkpoint.BLOCKS))
    for parts in (2**power for power in range(1, int(math.log2(LARGEST_ACCUMULATION)) + 1)):
        if recipe.batch % parts == 0 and recipe.batch > parts:
            found.append(_accumulation(recipe, parts))
    return found


def _accumulation(recipe: Recipe, parts: int) -> Change:
    micro = recipe.batch // parts
    total = parts * recipe.job.accumulate
    cost = f"batch norm, if any, sees {micro} samples at a time; small kernels may leave the GPU idle"

    def split(recipe: Recipe) -> Recipe:
        return replace(recipe, batch=micro, job=replace(recipe.job, accumulate=total))

    return Change(f"--accumulate {total} --batch {micro}", cost, 4, "accumulation", split)
