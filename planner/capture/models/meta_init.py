"""Calls a model's constructor so that its parameters and buffers take no memory: they end on `meta`."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from planner.capture.cuda.devices import META, Placement, is_put_on_gpu, keep_default_device, planned_device


def construct_on_meta(construct: Callable[[], object]) -> object:
    """What `construct` returns; if that is a module, all its parameters and buffers are on meta.

    Three ways, from the cheapest. Everything is made on meta; if the constructor reads values, only the
    parameters are; if it reads those too, the model is built on the CPU and moved. A constructor that fails
    for another reason is not called again. Raises what the constructor raises.
    """
    ways: tuple[Callable[[], AbstractContextManager[object]], ...] = (
        lambda: torch.device("meta"),
        parameters_on_meta,
        nullcontext,
    )
    for way, target in zip(ways[:-1], (META, "cpu"), strict=True):
        try:
            return _build(construct, way, target)[0]
        except Exception as error:
            if not _is_about_meta(error):
                raise
    return _build(construct, ways[-1], "cpu")[0]


def construct_with_values(construct: Callable[[], object]) -> tuple[object, list[tuple[Tensor, Tensor]]]:
    """What `construct` returns, and pairs of a tensor with values and its like on meta: all buffers, and such
    parameters as come from elsewhere than a constructor. Raises what the constructor raises.
    """
    try:
        return _build(construct, parameters_on_meta, "cpu")
    except Exception as error:
        if not _is_about_meta(error):
            raise
    return _build(construct, nullcontext, "cpu")


def _is_about_meta(error: Exception) -> bool:
    """So torch speaks when values of a meta tensor are asked for: "Cannot copy out of meta tensor",
    "Tensor.item() cannot be called on meta tensors", "... attempted to run ... with Meta tensors".
    """
    return "meta" in str(error).lower()


def _build(
    construct: Callable[[], object], way: Callable[[], AbstractContextManager[object]], gpu: str
) -> tuple[object, list[tuple[Tensor, Tensor]]]:
    """The model by one way; `gpu` is the device that stands for `cuda` meanwhile."""
    with planned_device(gpu) as placement:
        with warnings.catch_warnings(), way():
            warnings.simplefilter("ignore")  # advice on the initial weights, which do not exist
            model = construct()
        keep_default_device()
        if not isinstance(model, nn.Module):
            return model, []
        if gpu == META:
            _note_those_on_cpu(model, placement)
            return model, move_to_meta(model)
        return model, [*move_to_meta(model), *_move_placed(model, placement)]


def _plain_tensors(model: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Tensors that modules hold as attributes, or in lists and dicts of theirs: holder, key, tensor."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, Tensor):
                yield vars(module), name, value
            elif isinstance(value, list | dict):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from [(value, key, item) for key, item in items if isinstance(item, Tensor)]


def tensors_put_on_gpu(model: nn.Module) -> list[Tensor]:
    """Return plain attributes of modules that user code put on the GPU while the model was built."""
    return [tensor for _, _, tensor in _plain_tensors(model) if tensor.is_meta and is_put_on_gpu(tensor)]


def _note_those_on_cpu(model: nn.Module, placement: Placement) -> None:
    """`Module.to` leaves plain attributes where they are: those that were not put on the GPU."""
    for _, _, tensor in _plain_tensors(model):
        if tensor.is_meta and not placement.has_put(tensor):
            placement.on_cpu.append(weakref.ref(tensor))


def _move_placed(model: nn.Module, placement: Placement) -> list[tuple[Tensor, Tensor]]:
    """Put plain attributes that user code put on the GPU on meta; returns pairs as `move_to_meta`."""
    moved = []
    for holder, key, tensor in _plain_tensors(model):
        if placement.has_put(tensor) and not tensor.is_meta:
            holder[key] = placement.put(_like(tensor))
            moved.append((tensor, holder[key]))
    return moved


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While open, every parameter that a module registers is replaced by its like on meta.

    A parameter that several modules share stays shared. Changes `nn.Module` for all threads.
    """
    register = nn.Module.register_parameter
    likes = WeakIdKeyDictionary()

    def register_like(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not is_lazy(parameter) and not parameter.is_meta:
            if parameter not in likes:
                likes[parameter] = _like(parameter)
            parameter = likes[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_like  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def move_to_meta(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Put what is not on meta there; unlike `Module.to`, this keeps shared tensors shared.

    Returns each tensor that was elsewhere with its like on meta.
    """
    likes: dict[int, Tensor] = {}
    moved: list[tuple[Tensor, Tensor]] = []  # also keeps the ids in `likes` from being used again
    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in registries:
            for name, tensor in held.items():
                if tensor is None or tensor.device.type == "meta":
                    continue
                if id(tensor) not in likes:
                    likes[id(tensor)] = _like(tensor)
                    if not is_lazy(tensor):
                        moved.append((tensor, likes[id(tensor)]))
                held[name] = likes[id(tensor)]
    return moved


def _like(tensor: Tensor) -> Tensor:
    if is_lazy(tensor):
        return type(tensor)(device="meta", dtype=tensor.dtype)  # type: ignore[call-arg]
    like = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
