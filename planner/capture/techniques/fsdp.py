"""Shard a model of meta tensors with FSDP2 (`fully_shard`), block by block.

Each rank holds a part of each parameter. FSDP gathers the parameters of a block before the block runs, and
frees the gathered parameters afterwards by resizing a storage in place. No operator runs then, so
`replacements` reports the resizing to the recorder.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from planner.capture.cuda.names import Replacement
from planner.capture.distributed.accelerate_plugin import shard_by_accelerate
from planner.capture.loop.checkpoint import find_blocks, name_kinds
from planner.capture.models.live.job import unwrapped
from planner.capture.recorder.recorder import Recorder
from planner.errors import UsageError
from planner.jobs import OF_POLICY, Job
from planner.program import Category, Phase

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shard_blocks(model: nn.Module, job: Job, mesh: Any, recorder: Recorder) -> str:
    """Shard a model's repeated blocks, then its other parameters, in place; return a note for the trace.

    With `by=accelerate`, accelerate shards the model. Raises UsageError if `fully_shard` refuses.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    arguments = job.sharding.fsdp_arg
    of_policy = {key: _DTYPES.get(value, value) for key, value in arguments.non_default(*OF_POLICY).items()}
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**of_policy)}
    options |= arguments.non_default("reshard_after_forward")
    if arguments.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if arguments.by == "accelerate":
        with _moved_by_accelerate(model, recorder):
            return shard_by_accelerate(unwrapped(model), arguments, options, mesh)
    blocks = find_blocks(model)
    names = name_kinds(blocks)
    first, last = _ends_of(model) if arguments.by else ((), ())
    try:
        for block in (*first, *blocks):
            fully_shard(block, **options)
        if last:
            fully_shard([*last], **{**options, "reshard_after_forward": False})
        fully_shard(model, **options)
    except ValueError as error:
        raise UsageError(f"--fsdp {job.sharding.fsdp}: fully_shard refuses: {error}") from error
    if arguments.offload:
        _keep_on_host(model, recorder)
    else:
        _allocate_parts(model)
    if not blocks:
        return "FSDP: the model has no repeated blocks, so it is sharded as a whole"
    ends = "; embeddings, and norm and head together, by themselves" if last else ""
    return f"FSDP: sharded block by block ({names}){ends}, then the rest together"


def _allocate_parts(model: nn.Module) -> None:
    """Replace each padded shard of a parameter by a tensor without padding.

    `to_empty` allocates such tensors on the GPU.
    """
    for parameter in model.parameters():
        part = cast("Any", parameter)._local_tensor
        if part.untyped_storage().nbytes() != part.numel() * part.element_size():
            cast("Any", parameter)._local_tensor = torch.empty_like(part)


def _keep_on_host(model: nn.Module, recorder: Recorder) -> None:
    """Mark the shards of all parameters as pinned memory of the host.

    Buffers remain on the GPU. FSDP2 itself moves and pins shards only if they are not meta tensors
    (`reset_sharded_param` of _fsdp_param.py).
    """
    for parameter in model.parameters():
        recorder.host.pin(cast("Any", parameter)._local_tensor)


def _ends_of(model: Any) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Return the modules that torchtitan shards before and after the blocks.

    The embeddings come before, the last norm and the head come after. Source:
    torchtitan/models/llama3/infra/parallelize.py, `apply_fsdp`. Raises UsageError for a model without these
    modules or with tied weights.
    """
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    base = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    norms = [] if base is None else [one for one in base.children() if "Norm" in type(one).__name__]
    if embeddings is None or head is None or not norms or embeddings.weight is head.weight:
        raise UsageError("--fsdp-arg by=torchtitan: is for causal language models without tied weights")
    return (embeddings,), (norms[-1], head)


@contextmanager
def _moved_by_accelerate(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Mark a model's tensors as CPU tensors, and record their move to the GPU inside the context.

    After the context they get the category of parameters, buffers too.
    """
    recorder.start_phase(0, Phase.SETUP)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.host.add(tensor)
    with recorder:
        yield
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.set_category(tensor, Category.PARAMETER)


def replacements(on_resize: Callable[[Tensor], None]) -> Iterator[Replacement]:
    """Yield replacements that make FSDP accept meta parameters and report each storage that it resizes.

    `on_resize` is called with each tensor whose storage FSDP has allocated or freed in place: the gathered
    parameters of a block, before and after the block runs.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
    from torch.distributed.tensor import DTensor

    def resizing(resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def resized(tensor: Tensor) -> None:
            resize(tensor)
            on_resize(tensor)

        return resized

    move = _fsdp_init._move_states_to_device

    def moving(params: list[Any], buffers: list[Any], device: Any) -> None:
        for tensor in (*params, *buffers):
            if tensor.is_meta and not isinstance(tensor, DTensor):
                moved = tensor.to(device)  # a copy if it represents a tensor of the CPU
                if moved is not tensor:
                    tensor.data = moved
        move(params, buffers, device)

    yield _fsdp_param.FSDPParam, "reset_sharded_param", _padding(_fsdp_param.FSDPParam.reset_sharded_param)
    yield _fsdp_init, "_move_states_to_device", moving
    for name in ("alloc_storage", "free_storage"):
        yield _fsdp_param, name, resizing(getattr(_fsdp_param, name))
    for name in ("_validate_no_meta_params", "_validate_cpu_offload_params"):
        yield _fsdp_param_group.FSDPParamGroup, name, lambda self: None


def _padding(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a wrapper of `reset_sharded_param` that pads a meta shard to the size of other ranks' shards.

    Shards that FSDP made itself are not padded. If a parameter does not divide evenly, the shard that
    `to_empty` allocates on a late rank is smaller than on other ranks. The first forward pass copies that
    shard into a block of the padded size.
    """

    def run(self: Any) -> None:
        part = getattr(self._module_info.module, self._module_info.param_name)._local_tensor
        size = self.padded_sharded_param_size
        if not part.is_meta or part.size() == size or _share_storage(part, self._sharded_param_data):
            reset(self)
            return
        padded = part.new_zeros(size)
        rows = part.size(0) if part.numel() else 0
        padded.narrow(0, 0, rows).copy_(part)
        self._sharded_param_data = padded.view(-1)
        self.sharded_param._local_tensor = padded.narrow(0, 0, rows)

    return run


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
