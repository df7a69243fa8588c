"""Construct models on the meta device.

Their parameters and buffers then take no memory.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from planner.capture.cuda.devices.factories import keep_default_device
from planner.capture.cuda.devices.placed import PlacedResults, PlacedTensors
from planner.capture.cuda.devices.placement import META, Placement, is_put_on_gpu, placed_tensors
from planner.capture.cuda.devices.translation import placed_devices_shown, planned_device
from planner.capture.cuda.operators.semantics import cuda_semantics, has_cuda_semantics
from planner.capture.models.adapter_types import adapters_like_weights
from planner.capture.models.live.kept import live_state, living
from planner.capture.patching import patched
from planner.capture.wrapped import is_wrapped, parts, with_parts

Strategy = Callable[[], AbstractContextManager[object]]  # opened around the constructor
_REGISTRIES = ("_parameters", "_buffers", "_modules")


def construct_on_meta(construct: Callable[[], object]) -> object:
    """Return the result of `construct`, with a module's tensors on the meta device.

    The first of three strategies that works is used. First, all tensors are made on the meta device. If the
    constructor reads values, only parameters are made there. If it reads values of parameters too, the model
    is built on the CPU and moved. Raises the constructor's error; the next strategy is tried only for errors
    about values.
    """
    return _try_strategies(construct, (_everything_on_meta, *_WITH_VALUES))[0]


def construct_with_values(construct: Callable[[], object]) -> tuple[object, list[tuple[Tensor, Tensor]]]:
    """Return the result of `construct` on meta, and a (values, meta tensor) pair for each moved tensor.

    All buffers have values. Parameters that modules register meanwhile have none, unless the constructor
    reads values of parameters. Raises the constructor's error.
    """
    return _try_strategies(construct, _WITH_VALUES)


def _try_strategies(
    construct: Callable[[], object], strategies: Sequence[Strategy]
) -> tuple[object, list[tuple[Tensor, Tensor]]]:
    for strategy in strategies[:-1]:
        try:
            return _build(construct, strategy)
        except Exception as error:
            if not _is_about_meta(error):
                raise
    return _build(construct, strategies[-1])


def _is_about_meta(error: Exception) -> bool:
    """Return whether an error is about the missing values of a meta tensor.

    The values cannot be read, set or shared. Reading: "Cannot copy out of meta tensor", "Tensor.item() cannot
    be called on meta tensors", "... attempted to run ... with Meta tensors". Setting a parameter: "variable
    and tensor have incompatible tensor type". Sharing with other processes, as streamed datasets do:
    "_share_fd_: only available on CPU".
    """
    message = str(error).lower()
    return any(words in message for words in ("meta", "incompatible tensor type", "only available on cpu"))


def _build(construct: Callable[[], object], strategy: Strategy) -> tuple[object, list[tuple[Tensor, Tensor]]]:
    gpu = META if strategy is _everything_on_meta else "cpu"  # the device used for `cuda` meanwhile
    with planned_device(gpu) as placement, placement.placed.forgotten_on_error():
        with warnings.catch_warnings(), ExitStack() as stack:
            if gpu == META and not has_cuda_semantics():  # a loss is built while the loop runs
                stack.enter_context(cuda_semantics(placement.capability, placement.torch_version))
            stack.enter_context(strategy())
            stack.enter_context(gpu_followed(placement))
            warnings.simplefilter("ignore")  # advice on the initial weights, which do not exist
            model = construct()
        keep_default_device()
        if not isinstance(model, nn.Module):
            return model, []
        if gpu == META:
            _note_those_on_cpu(model, placement)
            return model, move_to_meta(model, placement)
        return model, [*move_to_meta(model, placement), *_move_placed(placement.placed)]


@contextmanager
def gpu_followed(placement: Placement) -> Iterator[None]:
    """Track tensors that user code puts on the GPU, and results computed from them, inside the context.

    The garbage collector is off inside the context, since it frees cycles at times that differ between runs;
    if something is on the GPU, cycles are collected at the end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with PlacedResults(placement.placed), placed_devices_shown(), adapters_like_weights():
            yield
    finally:
        if placement.placed:
            gc.collect()
        if was_enabled:
            gc.enable()


def _note_those_on_cpu(model: nn.Module, placement: Placement) -> None:
    """Mark tensors in unregistered attributes of modules as on the CPU.

    `Module.to` leaves them there. Tensors that user code put on the GPU are not marked, nor are parameters
    and buffers, even if an attribute holds them too, as scripts do for an optimizer.
    """
    registered = {id(one) for one in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        plain = [value for name, value in vars(module).items() if name not in _REGISTRIES]
        for one in tree_leaves(plain):
            is_plain = isinstance(one, Tensor) and id(one) not in registered
            if is_plain and one.is_meta and one not in placement.placed:
                placement.host.add(one)


def _move_placed(placed: PlacedTensors) -> list[tuple[Tensor, Tensor]]:
    """Move remaining tensors that user code put on the GPU to meta, and return (values, meta tensor) pairs.

    They are found wherever user code keeps them. Tensors that share a storage still share it afterwards.
    """
    kept = living(Tensor) if placed else []
    shared: dict[int, UntypedStorage] = {}
    moved = []
    kept = [one for one in kept if not one.is_meta and one in placed]
    for tensor in sorted(kept, key=Tensor._is_view, reverse=True):  # a view holds its base, which cannot move
        like = like_on_meta(tensor)
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            laid = tensor.storage_offset(), tensor.shape, tensor.stride()
            with torch.no_grad():
                like.set_(shared.setdefault(storage._cdata, whole), *laid)
        moved.append(_without_base(*_move(tensor, like, placed)))
        del like
    return moved


def _without_base(values: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
    return values.data if type(values) is Tensor else values, meta


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Replace each parameter that a module registers inside the context by its meta counterpart.

    Parameters that several modules share stay shared. A parameter that user code put on the GPU is itself
    moved to the meta device, since an optimizer or a step may hold it too. Changes `nn.Module` for all
    threads.
    """
    register = nn.Module.register_parameter
    likes = WeakIdKeyDictionary()

    def like_of(parameter: nn.Parameter) -> Any:
        if not is_put_on_gpu(parameter):
            return like_on_meta(parameter)
        placed = placed_tensors()
        with placed.copying_to_cpu():  # so that its like is no result of it
            return _move(parameter, like_on_meta(parameter), placed)[1]

    def register_like(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not is_lazy(parameter) and not parameter.is_meta:
            if parameter not in likes:
                likes[parameter] = like_of(parameter)
            parameter = likes[parameter]
        register(module, name, parameter)

    with patched(nn.Module, "register_parameter", register_like):
        yield


_everything_on_meta: Strategy = partial(torch.device, "meta")
_WITH_VALUES: tuple[Strategy, ...] = (parameters_on_meta, nullcontext)


def move_to_meta(model: nn.Module, placement: Placement) -> list[tuple[Tensor, Tensor]]:
    """Move a model's parameters and buffers to the meta device, and return (values, meta tensor) pairs.

    Shared tensors stay shared. `Module.to` does not keep them shared.
    """
    likes: dict[int, Tensor] = {}
    moved: list[tuple[Tensor, Tensor]] = []  # also keeps Python from reusing the ids in `likes`
    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in registries:
            for name, tensor in held.items():
                if tensor is None or tensor.device.type == "meta":
                    continue
                if id(tensor) in likes:
                    held[name] = likes[id(tensor)]
                elif is_lazy(tensor):
                    _, held[name] = _move(tensor, like_on_meta(tensor), placement.placed)
                    likes[id(tensor)] = held[name]
                else:
                    held[name] = torch.empty(0)  # a slot of a script module would prevent the move
                    values, held[name] = _move(tensor, like_on_meta(tensor), placement.placed)
                    moved.append((values, held[name]))
                    likes[id(values)] = held[name]
    return moved


def _move(tensor: Tensor, like: Tensor, placed: PlacedTensors) -> tuple[Tensor, Tensor]:
    """Move a tensor to the meta device in place if possible, and return (its values, the meta tensor).

    `like` is its counterpart on the meta device. The tensor object itself is moved, since optimizers and
    closures may hold it too. If a graph or a weak reference prevents this, the tensor keeps its values, and
    the meta tensor is `like`.
    """
    storages = [one.untyped_storage() for one in parts(tensor)]
    vars(like).update(vars(tensor))
    pair = like, tensor
    try:
        swap_tensors(tensor, like)  # type: ignore[no-untyped-call]
        live_state().note_move(like, tensor)
    except RuntimeError:
        pair = tensor, like
        vars(tensor)["planner_like"] = like  # whose block is freed with the tensor
    for old, new in zip(storages, parts(pair[1]), strict=True):
        placed.replace(old, new)
    return pair


def like_on_meta(tensor: Tensor) -> Tensor:
    """Return a new meta tensor with a tensor's shape, strides and dtype.

    The result is a parameter if the tensor is a parameter.
    """
    if is_wrapped(tensor):
        like = with_parts(tensor, like_on_meta)
        return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
    if is_lazy(tensor):
        return type(tensor)(device="meta", dtype=tensor.dtype)  # type: ignore[call-arg]
    like = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, tensor.requires_grad)
    return like.requires_grad_(tensor.requires_grad and tensor.is_leaf)
