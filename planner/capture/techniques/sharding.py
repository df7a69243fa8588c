"""Shard a model over ranks.

The weights of layers are split first (`--tp`), then blocks are sharded (`--fsdp`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import nn

from planner.capture.cuda.devices.placement import Placement
from planner.capture.distributed.other_ranks import OtherRanks
from planner.capture.distributed.process_group import process_group
from planner.capture.loop.runtime import Batch, BatchLoader
from planner.capture.models.live.job import unwrapped
from planner.capture.recorder.recorder import Recorder
from planner.capture.techniques import fsdp
from planner.capture.techniques.technique import Notes, Technique
from planner.capture.techniques.tensor_parallel import split_tensors
from planner.jobs import Job
from planner.program import Category, Fact


@contextmanager
def _open_process(job: Job, placement: Placement, other_ranks: OtherRanks) -> Iterator[None]:
    replacements = fsdp.replacements(lambda tensor: placement.on_resize(tensor))
    with process_group(job.sharding.ranks, placement.streams, job.sharding.rank, replacements):
        yield


@contextmanager
def _open_model(model: nn.Module, job: Job, recorder: Recorder) -> Iterator[Notes]:
    yield _shard_model(model, job, recorder)


def _shard_model(model: nn.Module, job: Job, recorder: Recorder) -> tuple[str, ...]:
    """Split a model's weights and shard its blocks as the job says, and return notes for the trace.

    If accelerate shards the model, it moves the model from the CPU, which `recorder` records. If all ranks
    hold equal parts, `Fact.EQUAL_PARTS` is added to the recorder's facts.

    Raises UsageError for a model without a tensor-parallel plan, or that cannot be split or sharded.
    """
    mesh = _mesh(job)
    notes = [split_tensors(model, job, mesh["tp"])] if job.sharding.tp else []
    if job.sharding.fsdp:
        names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
        notes.append(fsdp.shard_blocks(model, job, mesh[names], recorder))
    if not _has_equal_parts(model):
        return tuple(notes)
    recorder.facts.add(Fact.EQUAL_PARTS)
    return (*notes, "the parameters divide evenly: all ranks hold equal parts")


def _has_equal_parts(model: nn.Module) -> bool:
    """Return whether all ranks hold equal parts of each sharded parameter."""
    from torch.distributed.tensor import DTensor

    return all(_is_even(one) for one in model.parameters() if isinstance(one, DTensor))


def _is_even(parameter: Any) -> bool:
    split = dict.fromkeys(range(parameter.dim()), 1)
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if not placement.is_replicate():
            split[placement.dim] *= size
    return all(parameter.shape[dim] % parts == 0 for dim, parts in split.items())


def _mesh(job: Job) -> Any:
    """Return a mesh of all ranks on meta, with the dimensions in use among "replicate", "shard" and "tp"."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks, replicas = job.sharding.fsdp, job.sharding.fsdp_arg.replicas
    sizes = {
        "replicate": replicas if replicas > 1 else 0,
        "shard": ranks // replicas,
        "tp": job.sharding.tp,
    }
    dims = {name: size for name, size in sizes.items() if size}
    return init_device_mesh("meta", tuple(dims.values()), mesh_dim_names=tuple(dims))


def _with_last_synced(load_batch: BatchLoader, model: nn.Module, job: Job) -> BatchLoader:
    """Return a loader that makes FSDP reduce gradients only in a step's last micro-batch.

    In earlier micro-batches, gradients stay unsharded on each rank (`set_requires_gradient_sync`). The given
    loader is returned if the job does not accumulate, does not use FSDP, or syncs each micro-batch.
    """
    arguments = job.sharding.fsdp_arg
    if job.loop.accumulate < 2 or not job.sharding.fsdp or arguments.gradient_sync == "each":
        return load_batch
    is_wrapped = arguments.by == "accelerate"
    sharded: Any = unwrapped(model) if is_wrapped else model
    numbers = count(1)

    def load() -> Batch:
        if not model.training:  # a batch of the evaluation
            return load_batch()
        sharded.set_requires_gradient_sync(next(numbers) % job.loop.accumulate == 0)  # of all modules
        return load_batch()

    return load


def _keep_parameters(parameters: Iterable[nn.Parameter], recorder: Recorder) -> None:
    """Set the category of all parameters to `PARAMETER`. FSDP may have copied their shards."""
    for parameter in parameters:
        recorder.set_category(parameter, Category.PARAMETER)


SHARDING = Technique(
    lambda job: bool(job.sharding.fsdp or job.sharding.tp),
    open_process=_open_process,
    open_model=_open_model,
    change_loader=_with_last_synced,
    on_phase=_keep_parameters,
)
