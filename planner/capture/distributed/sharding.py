"""Shard a model over the ranks of a group: its layers' tensors by a plan, then blocks with FSDP2."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch
from torch import nn

from planner.capture.distributed.accelerate_plugin import OF_PLUGIN, shard_by_accelerate
from planner.capture.distributed.tensor_parallel import split_tensors
from planner.capture.loop.checkpoint import count_blocks, find_blocks
from planner.capture.loop.runtime import Batch, BatchLoader
from planner.capture.models.live import unwrapped
from planner.capture.recorder.recorder import Recorder
from planner.errors import UsageError
from planner.jobs import Job, parse_model_arg
from planner.program import EQUAL_PARTS_NOTE, Category, Phase

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OF_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
_KEYS = ("reshard_after_forward", "replicas", "gradient_sync", "by", "offload", *_OF_POLICY)


def rank_count(job: Job) -> int:
    """Return the number of ranks of a job."""
    return (job.fsdp or 1) * (job.tp or 1)


def check_rank(job: Job) -> None:
    """Refuse a rank that the job has not, and ranks of a file beside those of options. Raises UsageError."""
    ranks = rank_count(job)
    flag = "--fsdp" if job.fsdp else "--tp"
    if job.world_size:
        raise UsageError(
            f"{job.model}: --world-size {job.world_size} with {flag}: the file shards its model by itself; "
            f"leave {flag} away"
        )
    if job.rank >= ranks:
        raise UsageError(f"{job.model}: --rank {job.rank}: of {ranks} ranks give one from 0 to {ranks - 1}")


def fsdp_arguments(job: Job) -> dict[str, Any]:
    """Return the values of `--fsdp-arg`. Raises UsageError for one that is not planned."""
    given = dict(parse_model_arg(text, "--fsdp-arg") for text in job.fsdp_arg)
    keys = (*_KEYS, *(OF_PLUGIN if given.get("by") == "accelerate" else ()))
    for key in given:
        if key not in keys:
            hint = "; with by=accelerate more" if key in OF_PLUGIN else ""
            raise UsageError(f"--fsdp-arg {key}: planned are {', '.join(keys)}{hint}")
    if not isinstance(given.get("offload", False), bool) or (given.get("offload") and "by" in given):
        raise UsageError(f"--fsdp-arg offload={given['offload']}: use true or false, without by=")
    for key, values in {"by": ("accelerate", "torchtitan"), "gradient_sync": ("each", "last")}.items():
        if given.get(key, values[0]) not in values:
            raise UsageError(f"--fsdp-arg {key}={given[key]}: use {' or '.join(values)}")
    return given


def shard_model(model: nn.Module, job: Job, recorder: Recorder) -> tuple[str, ...]:
    """Split the tensors of a model's layers, shard its blocks, and return notes that name them.

    accelerate moves a model from the CPU while it shards it, which `recorder` records.

    Raises UsageError for a model without a plan, and for arguments of `--fsdp-arg` that are unknown or not
    planned.
    """
    given = fsdp_arguments(job)
    mesh = _mesh(job, given)
    notes = [split_tensors(model, job, mesh["tp"])] if job.tp else []
    if job.fsdp:
        names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
        notes.append(_shard_blocks(model, job, given, mesh[names], recorder))
    return (*notes, *_note_on_parts(model))


def _note_on_parts(model: nn.Module) -> Iterator[str]:
    """Yield that ranks do not differ, where each parameter divides evenly over them."""
    from torch.distributed.tensor import DTensor

    if all(_is_even(one) for one in model.parameters() if isinstance(one, DTensor)):
        yield f"the parameters divide evenly: {EQUAL_PARTS_NOTE}"


def _is_even(parameter: Any) -> bool:
    split = dict.fromkeys(range(parameter.dim()), 1)
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if not placement.is_replicate():
            split[placement.dim] *= size
    return all(parameter.shape[dim] % parts == 0 for dim, parts in split.items())


def with_last_synced(load_batch: BatchLoader, model: nn.Module, job: Job) -> BatchLoader:
    """Return a loader of batches before the last of which, in each step, gradients are not reduced.

    They stay whole on each rank until then (`set_requires_gradient_sync`), where the job asks for it.
    """
    if job.accumulate < 2 or not job.fsdp or fsdp_arguments(job).get("gradient_sync") != "last":
        return load_batch
    is_wrapped = fsdp_arguments(job).get("by") == "accelerate"
    sharded: Any = unwrapped(model) if is_wrapped else model
    numbers = count(1)

    def load() -> Batch:
        sharded.set_requires_gradient_sync(next(numbers) % job.accumulate == 0)  # of all modules
        return load_batch()

    return load


def _shard_blocks(model: nn.Module, job: Job, given: Mapping[str, Any], mesh: Any, recorder: Recorder) -> str:
    """Shard the repeated blocks of a model, then what is left of it, and return a note that names them."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    of_policy = {key: _policy_value(key, given[key]) for key in _OF_POLICY if key in given}
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**of_policy)}
    if "reshard_after_forward" in given:
        options["reshard_after_forward"] = given["reshard_after_forward"]
    if given.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy()
    if given.get("by") == "accelerate":
        with _moved_by_it(model, recorder):
            return shard_by_accelerate(unwrapped(model), given, options, mesh)
    blocks = find_blocks(model)
    names = count_blocks(blocks)
    first, last = _ends_of(model) if "by" in given else ((), ())
    try:
        for block in (*first, *blocks):
            fully_shard(block, **options)
        if last:
            fully_shard([*last], **{**options, "reshard_after_forward": False})
        fully_shard(model, **options)
    except ValueError as error:
        raise UsageError(f"--fsdp {job.fsdp}: fully_shard refuses: {error}") from error
    if given.get("offload"):
        _keep_on_host(model, recorder)
    else:
        _allocate_parts(model)
    if not blocks:
        return "FSDP: the model has no repeated blocks, so it is sharded as a whole"
    ends = "; embeddings, and norm and head together, by themselves" if last else ""
    return f"FSDP: sharded block by block ({names}){ends}, then the rest together"


def _allocate_parts(model: nn.Module) -> None:
    """Give parts that FSDP has padded blocks of their own size, as `to_empty` does on the GPU."""
    for parameter in model.parameters():
        part = cast("Any", parameter)._local_tensor
        if part.untyped_storage().nbytes() != part.numel() * part.element_size():
            cast("Any", parameter)._local_tensor = torch.empty_like(part)


def _keep_on_host(model: nn.Module, recorder: Recorder) -> None:
    """Take the parts of all parameters as pinned memory of the CPU; buffers stay on the GPU.

    FSDP2 itself moves and pins parts that are not on meta (`reset_sharded_param` of _fsdp_param.py).
    """
    for parameter in model.parameters():
        recorder.host.pin(cast("Any", parameter)._local_tensor)


def _ends_of(model: Any) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Return what torchtitan shards before and after the blocks: embeddings; the last norm and the head.

    As in torchtitan/models/llama3/infra/parallelize.py, `apply_fsdp`. Raises UsageError for other models.
    """
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    base = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    norms = [] if base is None else [one for one in base.children() if "Norm" in type(one).__name__]
    if embeddings is None or head is None or not norms or embeddings.weight is head.weight:
        raise UsageError("--fsdp-arg by=torchtitan: is for causal language models without tied weights")
    return (embeddings,), (norms[-1], head)


@contextmanager
def _moved_by_it(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Take a model as one on the CPU, and record what is done with it while open."""
    recorder.start_phase(0, Phase.SETUP)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.host.add(tensor)
    with recorder:
        yield
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.set_category(tensor, Category.PARAMETER)


def _mesh(job: Job, given: Mapping[str, Any]) -> Any:
    """Return the mesh of all ranks: it replicates parameters, shards them, and splits them."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks, replicas = job.fsdp, given.get("replicas", 1)
    if not isinstance(replicas, int) or replicas < 1 or ranks % replicas:
        raise UsageError(f"--fsdp-arg replicas={replicas}: {ranks} ranks do not divide into so many groups")
    if replicas > 1 and replicas == ranks:
        raise UsageError(f"--fsdp-arg replicas={replicas}: of {ranks} ranks each would hold all; use --ddp")
    sizes = {
        "replicate": replicas if replicas > 1 else 0,
        "shard": ranks // replicas,
        "tp": job.tp,
    }
    dims = {name: size for name, size in sizes.items() if size}
    return init_device_mesh("meta", tuple(dims.values()), mesh_dim_names=tuple(dims))


def _policy_value(key: str, value: Any) -> Any:
    if not key.endswith("_dtype"):
        return value
    if value not in _DTYPES:
        raise UsageError(f"--fsdp-arg {key}={value}: use one of {', '.join(_DTYPES)}")
    return _DTYPES[value]
