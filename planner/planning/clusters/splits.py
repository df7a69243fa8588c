"""List the ways to split a model and its global batch over GPUs."""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import UsageError
from planner.hardware import GPUS_OF_A_NODE
from planner.jobs import Checkpoint, FsdpArguments, Job

MOST_GPUS = 1024
LARGEST_TENSOR_PARALLEL = 8
_ACCUMULATED = 2  # micro-batches of a traced step; further micro-batches repeat the last


class ClusterQuestion(Struct, frozen=True):
    """A global batch to split, the number of GPUs of a node, and the largest number of GPUs."""

    global_batch: int
    gpus_per_node: int = GPUS_OF_A_NODE
    most_gpus: int = MOST_GPUS

    def gpu_counts(self, tp: int = 1) -> list[int]:
        """Return the numbers of GPUs over which the global batch can be split, in groups of `tp` GPUs.

        They are in ascending order. The number of groups divides the global batch. The number of GPUs divides
        a node or fills whole nodes.
        """
        most = min(self.most_gpus, self.global_batch * tp)
        return [
            count
            for count in range(tp, most + 1, tp)
            if self.global_batch % (count // tp) == 0
            and (self.gpus_per_node % count == 0 or count % self.gpus_per_node == 0)
        ]

    def most_tried(self) -> int:
        """Return the largest number of GPUs that is tried, with or without tensor parallel."""
        return max(self.gpu_counts(tp)[-1] for tp in (1, *self.tensor_parallel_sizes()))

    def tensor_parallel_sizes(self) -> list[int]:
        """Return ascending sizes above 1 for tensor parallel groups, divisors of a node's number of GPUs."""
        sizes = range(2, min(self.gpus_per_node, LARGEST_TENSOR_PARALLEL) + 1)
        return [size for size in sizes if self.gpus_per_node % size == 0 and self.gpu_counts(size)]


class Gathers(IntEnum):
    """The number of times that a block's weights are gathered from the GPUs in a step.

    A larger number takes less memory and more time.
    """

    NEVER = 0  # DDP: each GPU has all weights
    ONCE = 1  # FSDP2 that keeps gathered weights for the backward pass
    TWICE = 2  # FSDP2 that gathers weights again for the backward pass (ZeRO-3)


class SplitRecipe(Struct, frozen=True):
    """The checkpointing, gathering of weights and tensor parallel of a split.

    These measures save memory and cost time.
    """

    checkpoint: Checkpoint  # which blocks are computed again in the backward pass
    gathers: Gathers
    tp: int = 1  # GPUs that share the tensors of each layer and their batch

    def saves_no_more_than(self, other: "SplitRecipe") -> bool:
        """Return whether `other` recomputes and gathers at least as much, with equal tensor parallel size."""
        recomputes = self.checkpoint is Checkpoint.NONE or self.checkpoint is other.checkpoint
        return recomputes and self.gathers <= other.gathers and self.tp == other.tp


class Split(Struct, frozen=True):
    """The division of a global batch over a number of GPUs, by a recipe."""

    gpus: int
    recipe: SplitRecipe
    micro_batch: int
    accumulate: int  # micro-batches of a GPU, or of a group of `tp`, in each step of the optimizer

    @property
    def shards(self) -> int:
        """Return the number of FSDP shards of the weights, or 1 without FSDP.

        Tensor parallel does not count.
        """
        return 1 if self.recipe.gathers is Gathers.NEVER else self.gpus // self.recipe.tp


def recipes_of(job: Job) -> list[SplitRecipe]:
    """Return the recipes for splitting a job that its options leave open, the fastest first.

    The recipe of least memory comes last. Raises UsageError if the job's own options say how it is split over
    GPUs.
    """
    for name in ("fsdp", "ddp", "tp"):
        if job.value(name):
            raise UsageError(f"--{name}: --global-batch searches the split; remove --{name}")
    if job.loop.accumulate > 1:
        raise UsageError("--accumulate: --global-batch decides the micro-batches; remove it")
    checkpoints = [Checkpoint.NONE, Checkpoint.BLOCKS]
    if job.loop.checkpoint is not Checkpoint.NONE:
        checkpoints = [job.loop.checkpoint]
    arguments = job.sharding.fsdp_arg
    if arguments.replicas > 1:
        raise UsageError("--fsdp-arg replicas: --global-batch shards over all GPUs; remove it")
    gathers = list(Gathers)
    if arguments.reshard_after_forward is not None:
        gathers = [Gathers.TWICE if arguments.reshard_after_forward else Gathers.ONCE]
    elif arguments.non_default():
        gathers.remove(Gathers.NEVER)
    return [SplitRecipe(checkpoint, times) for checkpoint in checkpoints for times in gathers]


def splits_on(gpus: int, recipe: SplitRecipe, question: ClusterQuestion) -> Iterator[Split]:
    """Yield the splits by `recipe` over `gpus` GPUs, in ascending order of the micro-batch."""
    share = question.global_batch * recipe.tp // gpus
    for micro_batch in range(1, share + 1):
        if share % micro_batch == 0:
            yield Split(gpus, recipe, micro_batch, share // micro_batch)


def job_of(job: Job, split: Split) -> Job:
    """Return the job of one rank of a split, with at most `_ACCUMULATED` micro-batches.

    The split decides checkpointing, sharding and accumulation. Further micro-batches repeat the last.
    """
    accumulate = min(split.accumulate, _ACCUMULATED)
    alone: dict[str, Any] = {"checkpoint": split.recipe.checkpoint, "accumulate": accumulate}
    gathers, tp = split.recipe.gathers, split.recipe.tp
    alone |= {"tp": tp if tp > 1 else 0}
    if split.shards == 1:
        return job.replace(
            fsdp=0, fsdp_arg=FsdpArguments(), ddp=gathers is Gathers.NEVER and split.gpus > 1, **alone
        )
    reshards = False if gathers is Gathers.ONCE else None
    arguments = replace(job.sharding.fsdp_arg, reshard_after_forward=reshards)
    return job.replace(fsdp=split.shards, fsdp_arg=arguments, **alone)
