"""Replace the functions that make tensors, so that `cuda` names the device of the capture."""

import functools
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device as device_mode

from planner.capture.cuda.callers import is_of_torch
from planner.capture.cuda.devices.host_tensors import Side
from planner.capture.cuda.devices.names import HOST_DEVICE, names_cpu, names_gpu
from planner.capture.cuda.devices.placement import (
    GPU,
    META,
    META_DEVICE,
    is_meta,
    is_put_on_gpu,
    opened,
    target_of,
)
from planner.capture.cuda.threads import caller_frame
from planner.capture.wrapped import add_wrapper_class


def defaulting(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a version of `DeviceContext.__init__` that puts the device of the capture in place of a GPU."""

    def start(self: Any, device: object) -> None:
        is_gpu = names_gpu(device)
        plain(self, target_of(device) if is_gpu else device)
        self.planner_is_gpu = is_gpu

    return start


def putting_defaults(plain: Callable[..., Any], constructors: Container[Any]) -> Callable[..., Any]:
    """Return a version of `DeviceContext.__torch_function__` that logs tensors made on a default GPU."""

    def run(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_default = func in constructors and (kwargs or {}).get("device") is None  # which `plain` sets
        made = plain(self, func, types, args, kwargs)
        if is_default and opened and getattr(self, "planner_is_gpu", False):
            opened[-1].put(made)
        return made

    return run


def keep_default_device() -> None:
    """Let a default GPU that a constructor set outlast the enclosing `with torch.device(...)` region.

    The end of the region would otherwise remove the default device. The new default is `meta`, which stands
    for the GPU.
    """
    chosen = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if getattr(chosen, "planner_is_gpu", False):
        del torch._GLOBAL_DEVICE_CONTEXT.device_context
        torch.set_default_device(META)


def making(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a tensor factory that accepts `cuda` and `pin_memory` without a GPU.

    A pinned tensor becomes a stand-in on the meta device if new CPU tensors do (`Placement.stands_for_host`).
    """

    takes_numbers = plain.__name__ in ("tensor", "as_tensor")
    if takes_numbers:
        plain = _copying_numbers(plain)

    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], list | tuple) and takes_numbers:
            args = (_with_numbers(args[0]), *args[1:])
        device = kwargs.get("device")
        if takes_numbers and device is None and _is_default_gpu():
            device = GPU
        if kwargs.get("pin_memory") or ("pin_memory" in kwargs and _is_of_save_on_cpu()):
            kwargs["pin_memory"] = False
            placement = opened[-1]
            if placement.stands_for_host and (device is None or names_cpu(device)):
                with placement.host.moving_to(Side.HOST):
                    return placement.host.pin(plain(*args, **{**kwargs, "device": META}))
        if device is not None:
            if not names_gpu(device):
                if device == HOST_DEVICE or _is_meta_by_user(device, caller_frame()):
                    with opened[-1].host.moving_to(Side.HOST):
                        return plain(*args, **kwargs)
                return plain(*args, **kwargs)
            source = args[0] if args and isinstance(args[0], Tensor) and is_meta(args[0]) else None
            if source is not None and plain.__name__ in ("as_tensor", "asarray"):
                return source.to(device=device, dtype=kwargs.get("dtype"))
            kwargs["device"] = target_of(device)
            with _made_on(Side.GPU, source):
                return opened[-1].put(plain(*args, **kwargs))
        if any(isinstance(one, torch.device) and one.type == "cuda" for one in args):
            args = tuple(target_of(one) if isinstance(one, torch.device) else one for one in args)
            return opened[-1].put(plain(*args, **kwargs))
        if plain.__name__ == "new_tensor" and is_meta(args[0]):
            with _made_on(Side.HOST if args[0] in opened[-1].host else Side.GPU, args[1]):
                made = plain(*args, **kwargs)
        else:
            made = plain(*args, **kwargs)
        is_unseen = plain.__name__ in ("new", "new_tensor")  # by modes, since torch makes it beneath them
        return opened[-1].put(made) if is_unseen and is_put_on_gpu(args[0]) else made

    return make


def _copying_numbers(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `torch.tensor` or `as_tensor` that makes a tensor on the CPU, then copies it.

    torch does so too, but beneath all modes.
    """

    @functools.wraps(plain)
    def make(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
        if device is None or (args and isinstance(args[0], Tensor)):
            return plain(*args, device=device, **kwargs).requires_grad_(requires_grad)
        return plain(*args, device="cpu", **kwargs).to(device).requires_grad_(requires_grad)

    return make


def _is_default_gpu() -> bool:
    """Return whether a loop is running and its default device is the GPU."""
    return opened[-1].is_running and device_mode.CURRENT_DEVICE == META_DEVICE


def _made_on(side: Side, source: object) -> AbstractContextManager[None]:
    """Return a context that puts results on `side` if `source` is a tensor of the other side, or a no-op."""
    host = opened[-1].host
    is_other = isinstance(source, Tensor) and is_meta(source) and (source in host) is (side is Side.GPU)
    return host.moving_to(side) if is_other else nullcontext()


def _with_numbers(data: Any) -> Any:
    """Return nested lists with scalar meta tensors replaced by numbers.

    Without the replacement, torch would read the numbers below Python.
    """
    if isinstance(data, list | tuple):
        return [_with_numbers(one) for one in data]
    return data.item() if isinstance(data, Tensor) and is_meta(data) and data.dim() == 0 else data


def _is_meta_by_user(device: object, caller: FrameType) -> bool:
    """Return whether user code in a running loop names the device `meta`.

    Such a tensor has no memory on any device. torch's own code gets the name `meta` from tensors of the GPU.
    """
    is_named = device in (META, META_DEVICE)
    return is_named and opened[-1].is_running and not is_of_torch(caller)


def _is_of_save_on_cpu() -> bool:
    """Return whether torch's `save_on_cpu` called the factory. It pins memory only if torch finds a GPU."""
    return caller_frame(2).f_globals.get("__name__") == "torch.autograd.graph"


def wrapping(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of `Tensor._make_wrapper_subclass` that takes `cuda` as the device of the capture.

    It notes the classes of the wrappers that it makes.
    """

    @functools.wraps(plain)
    def make(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        add_wrapper_class(cls)
        device = kwargs.get("device")
        if opened and device is not None and names_gpu(device):
            kwargs["device"] = target_of(device)
        return plain(cls, *args, **kwargs)

    return make
