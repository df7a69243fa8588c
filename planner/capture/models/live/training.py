"""Derive a job from the objects of a training loop.

These are a model on a GPU, its optimizer, a batch and a loss. Precision, memory format,
DistributedDataParallel and autocast become fields of a job; wrappers that no plan follows are refused by
name. The planned step is the usual loop: it calls the model on the inputs of the batch, then the loss, and
keeps the output alive until the next output exists.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from planner.capture.models.live.job import Step, copy_weightless
from planner.errors import UsageError
from planner.jobs import Loss, MemoryFormat, Precision

LossFunction = Callable[..., Any]
_LOSSES: Mapping[str, LossFunction] = {
    Loss.CROSS_ENTROPY: F.cross_entropy,
    Loss.MSE: F.mse_loss,
    Loss.BCE_WITH_LOGITS: F.binary_cross_entropy_with_logits,
    Loss.SUM: lambda output, target: output.sum(),
}
_AUTOCAST = {torch.float16: Precision.AMP_FP16, torch.bfloat16: Precision.AMP_BF16}
_HALF = {torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16}
_BLOCK_BYTES = 512  # the caching allocator rounds sizes up to multiples of this


class LiveTraining(Struct, frozen=True):
    """A training loop as derived from its objects: the module, the fields of a job and the step."""

    module: nn.Module  # without wrappers
    name: str  # name of the module's class
    fields: Mapping[str, Any]  # fields of `planner.Job`
    step: Step
    notes: tuple[str, ...]  # assumptions about the loss
    is_compiled: bool
    expected: tuple[tuple[int, ...], ...] | None  # shapes of the model's inputs, or None if a step is given


def cuda_index_of(model: nn.Module) -> int | None:
    """Return the index of the GPU that holds parameters or buffers of a model, or None if no GPU does.

    Raises UsageError for a model on several GPUs.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    gpus = {device.index for device in devices if device.type == "cuda"}
    if len(gpus) > 1:
        raise UsageError(f"the model is on {len(gpus)} GPUs; plans are made for one")
    return next(iter(gpus), None)


def read_training(
    model: nn.Module, batch: object, loss: str | LossFunction | None, step: Step | None
) -> LiveTraining:
    """Derive a training loop from a model, a batch, and a loss or a step.

    `loss` and `step` are the arguments of `planner.guard`. Raises UsageError for a model that is sharded or
    wrapped in an unsupported way, for an unknown loss, and if both a loss and a step are given.
    """
    module, fields, is_compiled = _unwrapped(model)
    fields |= _precision_of(module) | _memory_format_of(module)
    notes: tuple[str, ...] = ()
    if step is None:
        if loss is None and not isinstance(batch, Mapping):
            notes = (
                "the loss is taken to be the model's own scalar, else cross_entropy of classes and mse of "
                "other targets; loss= says which",
            )
        step = _step_of(batch, _loss_function(loss))
        expected = _shapes(batch if isinstance(batch, Mapping) else _parts(batch)[0])
    else:
        if loss is not None:
            raise UsageError("loss and step: a step returns its loss; give one of them")
        expected = None
    return LiveTraining(module, type(module).__name__, fields, step, notes, is_compiled, expected)


def _unwrapped(model: Any) -> tuple[nn.Module, dict[str, Any], bool]:
    fields: dict[str, Any] = {}
    is_compiled = model._compiled_call_impl is not None
    while True:
        kind = type(model).__name__
        if kind == "OptimizedModule":
            model, is_compiled = model._orig_mod, True
        elif kind == "DistributedDataParallel":
            fields = {"ddp": True, "ddp_bucket_view": bool(model.gradient_as_bucket_view)}
            model = model.module
        else:
            break
    names = {one.__name__ for one in type(model).__mro__}
    if "DataParallel" in names:
        raise UsageError("DataParallel gathers on the first GPU; start one process per GPU with torchrun")
    sharded = names & {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
    if sharded or any(type(one).__name__ == "DTensor" for one in model.parameters()):
        by_hand = "plan the model before it is sharded: planner.max_batch(..., fsdp=8)"
        raise UsageError(f"the model is sharded already; {by_hand}")
    if "_original_forward" in vars(model):
        raise UsageError("accelerate has prepared the model; guard with step= before accelerator.prepare")
    return model, fields, is_compiled


def _precision_of(module: nn.Module) -> dict[str, Any]:
    """Return the job field `precision` of the enclosing autocast, or else of half-precision weights, or {}.

    Weights count only if all have the same half-precision type.
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        return {"precision": _AUTOCAST[dtype]} if dtype in _AUTOCAST else {}
    dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
    return {"precision": _HALF[dtypes.pop()]} if len(dtypes) == 1 and dtypes <= _HALF.keys() else {}


def _memory_format_of(module: nn.Module) -> dict[str, Any]:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for one in module.parameters():
        known = formats.get(one.dim())
        if known is not None and not one.is_contiguous() and one.is_contiguous(memory_format=known):
            return {"memory_format": MemoryFormat.CHANNELS_LAST}
    return {}


# ---- the step


def _loss_function(loss: str | LossFunction | None) -> LossFunction | None:
    if loss is None or loss == Loss.OUTPUT:
        return None
    if isinstance(loss, str):
        if loss not in _LOSSES:
            raise UsageError(f"loss {loss!r}: give a function of output and target, or {', '.join(_LOSSES)}")
        return _LOSSES[loss]
    return copy_weightless(loss) if isinstance(loss, nn.Module) else loss


def _parts(batch: object) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the target of a batch. The target is the last item, or None for a single item."""
    if not isinstance(batch, list | tuple):
        return (batch,), None
    return (tuple(batch), None) if len(batch) == 1 else (tuple(batch[:-1]), batch[-1])


def _step_of(batch: object, loss: LossFunction | None) -> Step:
    """Return a step that calls the model, then the loss, on a batch.

    The step returns both loss and output. Without `loss`, a step on a mapping returns the model's output
    alone. A plan keeps a step's result alive until the next step, as the variables of a loop do.
    """

    def on_mapping(module: nn.Module, given: Any) -> Any:
        output = module(**given)
        if loss is None:
            return output
        target = given.get("labels", given.get("target"))
        return {"loss": loss(output, target), "output": output}

    def on_parts(module: nn.Module, given: Any) -> Any:
        inputs, target = _parts(given)
        output = module(*inputs)
        return {"loss": _guessed(output, target) if loss is None else loss(output, target), "output": output}

    return on_mapping if isinstance(batch, Mapping) else on_parts


def _guessed(output: Any, target: Any) -> Any:
    own = getattr(output, "loss", output)
    if isinstance(own, Tensor) and own.dim() == 0:
        return own
    if not (isinstance(own, Tensor) and isinstance(target, Tensor)):
        raise UsageError("the loss is not known; give loss=, a function of output and target, or step=")
    return F.mse_loss(own, target) if target.is_floating_point() else F.cross_entropy(own, target)


def _shapes(values: object) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def outside_autocast() -> AbstractContextManager[object]:
    """Return a context that disables autocast on CUDA. Autocast may be enabled when a plan is made."""
    return torch.autocast("cuda", enabled=False)


# ---- memory in use on the GPU already


def other_bytes(model: nn.Module, optimizer: optim.Optimizer, batch: object, index: int) -> int:
    """Return the bytes allocated on GPU `index` outside of the training loop.

    Tensors of the model, its gradients, the optimizer state and the batch are not counted.
    """
    state = tree_leaves([list(values.values()) for values in optimizer.state.values()])
    grads = [one.grad for one in model.parameters()]
    storages = {}
    for one in (*model.parameters(), *model.buffers(), *grads, *state, *tree_leaves(batch)):
        if isinstance(one, Tensor) and one.device == torch.device("cuda", index):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
    return max(0, torch.cuda.memory_allocated(index) - sum(storages.values()))


def hold_other_bytes(module: nn.Module, size_bytes: int) -> None:
    """Register a meta buffer of `size_bytes` on a module, for other memory in use on the GPU."""
    module.register_buffer("held_beside", torch.empty(size_bytes, dtype=torch.uint8, device="meta"))


# ---- the model's identity


def digest_of(training: LiveTraining, optimizer: optim.Optimizer, *functions: object) -> str:
    """Return a digest of a loop's module classes, tensor shapes, optimizer options and forward code.

    The digest tells two models of the same name apart; the code cannot be recovered from it.
    """
    return sha256("\n".join(_lines(training.module, optimizer, functions)).encode()).hexdigest()[:16]


def _lines(module: nn.Module, optimizer: optim.Optimizer, functions: Iterable[object]) -> Iterable[str]:
    kinds = set()
    for name, one in module.named_modules():
        yield f"{name} {type(one).__qualname__} {one.extra_repr()}"
        kinds.add(type(one))
    tensors = (*module.named_parameters(), *module.named_buffers())
    for name, tensor in tensors:
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
    for group in optimizer.param_groups:
        plain = {key: value for key, value in group.items() if isinstance(value, bool | str | None)}
        yield f"{type(optimizer).__qualname__} {sorted(plain.items(), key=str)} {len(group['params'])}"
    codes = [kind.forward for kind in kinds if not kind.__module__.startswith("torch.")]
    codes += [_plain_function(one) for one in functions if one is not None]
    yield from sorted(map(_source, codes))


def _plain_function(one: object) -> Any:
    if isinstance(one, partial):
        return one.func
    return type(one).forward if isinstance(one, nn.Module) else one


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # a loss's name, a C function, or a function of an interactive session
        return str(getattr(function, "__qualname__", function))
