"""Replace the functions that move tensors and modules between the GPU and the CPU."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from planner.capture.cuda.callers import is_of_torch
from planner.capture.cuda.devices.host_tensors import HostTensors, Side
from planner.capture.cuda.devices.names import HOST_DEVICE, is_index, names_cpu, names_gpu
from planner.capture.cuda.devices.placement import (
    CPU,
    GPU,
    META,
    META_DEVICE,
    add_remark,
    is_meta,
    is_on_host,
    is_put_on_gpu,
    opened,
    target_of,
)
from planner.capture.cuda.threads import caller_frame
from planner.capture.patching import patched
from planner.capture.wrapped import is_wrapped


def moving(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of `Tensor.to` that moves meta tensors between GPU and CPU.

    Stand-ins count as CPU tensors, other meta tensors as tensors of the GPU.
    """

    plain = _by_class(plain)

    @functools.wraps(plain)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = kwargs.get("device", args[0] if args else None)
        if not opened or place is None:
            return plain(self, *args, **kwargs)
        placement = opened[-1]
        host = placement.host
        is_gpu, is_cpu = names_gpu(place), names_cpu(place)
        is_placed = not placement.is_running and self in placement.placed
        if place == META_DEVICE and (self in host or (is_placed and not is_meta(self))):
            is_gpu = True  # torch's own code knows the GPU by this name
        if isinstance(place, Tensor):
            is_cpu = place in host
            is_gpu = not is_cpu and (is_meta(place) if placement.is_running else place in placement.placed)
            if is_cpu:
                args, kwargs = _with_device(META, args, {**kwargs, "dtype": kwargs.get("dtype", place.dtype)})
        elif is_gpu:
            target = target_of(place)
            args, kwargs = _with_device(META if is_meta(self) else target, args, kwargs)
        if is_cpu and is_placed:
            if is_meta(self):
                args, kwargs = _with_device(META, args, kwargs)
            with placement.placed.copying_to_cpu():
                moved = plain(self, *args, **{**kwargs, "copy": True})
        elif not is_meta(self):
            moved = plain(self, *args, **kwargs)
        elif is_gpu and (self in host or (placement.is_running and not placement.has_recorded(self))):
            with host.moving_to(Side.GPU):
                moved = plain(self, *args, **{**kwargs, "copy": True})
            _move_gradient(moved, host, Side.HOST)
        elif is_cpu and (self in host or not placement.is_running):  # it is on the CPU already
            args, kwargs = _with_device(META, args, kwargs)
            moved = plain(self, *args, **kwargs)
        elif is_cpu and (place == HOST_DEVICE or placement.stands_for_host or _is_tracked(self)):
            args, kwargs = _with_device(META, args, kwargs)
            with host.moving_to(Side.HOST):
                moved = plain(self, *args, **{**kwargs, "copy": True})
            _move_gradient(moved, host, Side.GPU)
            if kwargs.get("non_blocking"):  # then torch pins it (native/TensorConversions.cpp, _to_copy)
                host.pin(moved)
        else:
            moved = plain(self, *args, **kwargs)
            if is_gpu and not placement.is_running and _is_partial(moved) and self not in placement.placed:
                moved = moved.clone()  # which has no more elements than the view
        return placement.put(moved) if is_gpu else moved

    return to


def _is_tracked(tensor: Tensor) -> bool:
    """Return whether a tensor that moves to the CPU stays on meta, as an optimizer or autograd holds it."""
    return opened[-1].moves_module or (tensor.requires_grad and torch.is_grad_enabled())


def _move_gradient(moved: Tensor, host: HostTensors, side: Side) -> None:
    """Register a hook that moves the gradient of `moved` to `side`, from which the tensor came.

    To autograd both tensors are on the meta device, so that it moves no gradient. The gradient of that
    gradient moves back.
    """

    def move(gradient: Tensor) -> Tensor:
        with host.moving_to(side):
            copy = gradient.to(dtype=gradient.dtype, copy=True)
        _move_gradient(copy, host, Side.GPU if side is Side.HOST else Side.HOST)
        return copy

    if moved.grad_fn is not None:
        moved.register_hook(move)  # type: ignore[no-untyped-call]


def _is_partial(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a part of its storage.

    An example is the result of `hann_window`.
    """
    if is_wrapped(tensor) or not is_meta(tensor) or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _by_class(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of a tensor method that calls `__torch_function__` instead for wrapper tensors.

    The class's `__torch_function__` recognizes torch's own method by its identity.
    """

    @functools.wraps(plain)
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_wrapped(self) and torch._C._is_torch_function_enabled():
            kind: Any = type(self)
            return kind.__torch_function__(plain, (kind,), (self, *args), kwargs)
        return plain(self, *args, **kwargs)

    return call


def device_given(*args: Any, **kwargs: Any) -> object:
    """Return the device that the arguments of `Module.to` name, or None."""
    return torch._C._nn._parse_to(*args, **kwargs)[0]


def moving_module(
    plain: Callable[..., nn.Module], device_of: Callable[..., object]
) -> Callable[..., nn.Module]:
    """Return a version of `Module.to`, `cuda` or `cpu` that records moves while the model is built.

    Tensors moved to the GPU are logged; modules moved to the CPU are added to `Placement.on_cpu`. Nothing is
    recorded while the loop runs. A module that user code moves to the meta device, where it takes no memory,
    is moved to the CPU. `plain` is the original method, and `device_of` returns the device that its arguments
    name. If the dtype changes too, a parameter gets new data but remains the object by which it is found
    later.
    """

    @functools.wraps(plain)
    def move(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args = tuple(map(_named, args))  # torch without a GPU refuses the index of a GPU
        kwargs = {key: _named(value) if key == "device" else value for key, value in kwargs.items()}
        device = device_of(*args, **kwargs)
        is_built = bool(opened) and not opened[-1].is_running
        if is_built and device == META_DEVICE and not is_of_torch(caller_frame()):
            device = CPU
            args, kwargs = _with_device("cpu", args, kwargs)
        if not is_built:
            with opened[-1].moving_module() if opened else nullcontext():
                return plain(self, *args, **kwargs)
        moved, placement = plain(self, *args, **kwargs), opened[-1]
        if names_gpu(device):
            placement.on_cpu -= set(moved.modules())
            for _, module in in_order_of_apply(moved):
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    placement.put(tensor)
        elif names_cpu(device):
            placement.on_cpu |= set(moved.modules())
        return moved

    return move


def _named(device: Any) -> Any:
    return torch.device("cuda", device) if is_index(device) else device


def in_order_of_apply(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) pairs in the order in which `Module.to` moves the tensors: children first."""
    for name, child in model.named_children():
        yield from in_order_of_apply(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, model


def _with_device(
    device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `Tensor.to` with the device replaced."""
    if "device" in kwargs:
        return args, {**kwargs, "device": device}
    return (device, *args[1:]), kwargs


def pin(self: Tensor, device: Any = None) -> Tensor:
    """Return a pinned copy of an unpinned stand-in for a CPU tensor, or any other tensor unchanged."""
    host = opened[-1].host if opened else None
    if host is None or self not in host or host.is_pinned(self):
        return self
    with host.moving_to(Side.HOST):
        return host.pin(self.clone())


def record_stream(self: Tensor, stream: Any) -> None:
    """Add a remark that a stream's work is planned as done before the next memory request."""
    add_remark(
        "calls Tensor.record_stream: that stream's work is planned as done when memory is next asked for"
    )


def pinned_like(tensor: Tensor) -> Tensor:
    """Return a meta tensor that stands for a pinned CPU copy of `tensor`. Its creation is not recorded."""
    host = opened[-1].host
    with _disable_current_modes(), host.moving_to(Side.HOST):
        return host.pin(torch.empty_like(tensor, device=META, requires_grad=False))


def to_host(self: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
    return self.to("cpu", memory_format=memory_format)


def reading_array(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `Tensor.numpy` that also reads meta tensors that stand for CPU tensors.

    It reads their values. For a tensor of the GPU it raises TypeError in a running loop, unless `force` is
    set.
    """

    @functools.wraps(plain)
    def numpy(self: Tensor, *, force: bool = False) -> Any:
        if not opened or not is_meta(self):
            return plain(self, force=force)
        placement = opened[-1]
        if not (force or self in placement.host):
            if placement.is_running:
                raise TypeError("a tensor of the GPU is no array, on a GPU either; copy it with .cpu() first")
            return plain(self)
        return plain(torch.ops.aten._to_copy.default(self.detach(), device=CPU))

    return numpy


def to_type_of(self: Tensor, other: Tensor) -> Tensor:
    return self.to(other)


def to_gpu(self: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    return self.to("cuda" if device is None else device, non_blocking=non_blocking, **options)


def loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `torch.load` that puts a storage on the planned GPU if torch would put it on a GPU.

    Without `map_location` the file says which storages were on a GPU when they were saved.
    """

    @functools.wraps(plain)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not opened:
            return plain(f, map_location, *args, **kwargs)

        def place(storage: UntypedStorage, saved: str) -> UntypedStorage:
            named: Any = map_location
            if callable(map_location):
                placed: UntypedStorage | None = map_location(storage, saved)
                if placed is not None:
                    return placed
                named = saved
            elif map_location is None:
                named = saved
            elif isinstance(map_location, Mapping):
                named = map_location.get(saved, saved)
            return storage_to_gpu(storage) if names_gpu(named) else storage

        placement, side = opened[-1], None
        if map_location is not None:  # the side of tensors saved during the capture, which have no storage
            probe = torch.empty(0, dtype=torch.uint8, device=CPU)
            nothing = probe.untyped_storage()
            is_left = place(nothing, "cuda:0") is nothing and not is_put_on_gpu(probe)
            side = Side.HOST if is_left else Side.GPU
        with ExitStack() as stack:
            if side is Side.HOST:
                stack.enter_context(placement.host.moving_to(side))
            stack.enter_context(patched(UntypedStorage, "data_ptr", _address))  # tells shared storages
            loaded = plain(f, place, *args, **kwargs)
        _place_loaded(loaded, side)
        return loaded

    return load


def unpickling(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `pickle.load` or `loads` that puts meta tensors on the GPU if others are there."""

    @functools.wraps(plain)
    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = plain(*args, **kwargs)
        if opened and not is_of_torch(caller_frame()):
            _place_loaded(loaded, None)
        return loaded

    return load


def _place_loaded(loaded: object, side: Side | None) -> None:
    """Put the meta tensors in `loaded` on `side`; with None, on the GPU if any tensor was put there.

    This capture has saved the tensors. The file does not tell on which side they were.
    """
    placement = opened[-1]
    for one in filter(is_meta, _tensors_of(loaded)):
        if side is Side.HOST:
            placement.host.add(one)
        elif side is Side.GPU or placement.placed:
            placement.put(one)


def locating(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a version of torch's `location_tag` that names the GPU for storages on the planned GPU."""

    @functools.wraps(plain)
    def location_tag(storage: Any) -> Any:
        return str(GPU) if opened and opened[-1].placed.has_storage(storage) else plain(storage)

    return location_tag


def _tensors_of(loaded: object) -> Iterator[Tensor]:
    """Yield the tensors of a loaded object, including the parameters and buffers of its modules."""
    for one in tree_leaves(loaded):
        if isinstance(one, nn.Module):
            yield from (*one.parameters(), *one.buffers())
        elif isinstance(one, Tensor):
            yield one


def storage_to_gpu(self: UntypedStorage, *_: Any, **__: Any) -> UntypedStorage:
    """Put a CPU storage on the planned GPU and return it; a meta storage is returned unchanged.

    Inside a running loop, and if the model is built by shapes alone, the result is a meta storage.
    """
    placement = opened[-1]
    if self.device.type == META:
        return self
    if placement.is_running or placement.target == META:
        made = torch.empty(self.nbytes(), dtype=torch.uint8, device=META)
    else:
        made = torch.empty(0, dtype=torch.uint8, device=CPU).set_(self)
    storage: UntypedStorage = placement.put(made).untyped_storage()
    return storage


def _address(storage: UntypedStorage) -> int:
    return int(storage._cdata)


def staying(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a function that keeps a packed or padded sequence on the CPU if it is there.

    torch's own moves to the sequence's device name the meta device.
    """

    @functools.wraps(plain)
    def stay(*args: Any, **kwargs: Any) -> Any:
        sequence, *_ = *args, *kwargs.values()
        with opened[-1].host.moving_to(Side.HOST) if is_on_host(sequence.data) else nullcontext():
            return plain(*args, **kwargs)

    return stay
