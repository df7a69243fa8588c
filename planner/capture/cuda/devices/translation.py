"""Translate the device `cuda` in user code to the device of the capture.

Most files name the GPU: `device="cuda"`, `.cuda()`, `x.device.type == "cuda"`. A `TorchFunctionMode` would
see such calls, but a mode also disables torch's fast paths (`has_torch_function`), which changes memory.
Instead, Python functions that make tensors, move them, or return their device are replaced. torch's own code
and the planner's code see the tensors' true device, `meta`.
"""

import functools
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import _device
from torch.utils._python_dispatch import _disable_current_modes

from planner.capture.cuda import graphs as cuda_graphs, saved_files
from planner.capture.cuda.callers import is_of_torch, line_of_caller, skips_meta
from planner.capture.cuda.devices import queries as device_queries
from planner.capture.cuda.devices.host_tensors import HostTensors, Side
from planner.capture.cuda.devices.names import names_cpu, names_gpu
from planner.capture.cuda.devices.placed import PlacedTensors
from planner.capture.cuda.names import Names, Replacement
from planner.capture.cuda.streams import Streams
from planner.capture.cuda.threads import caller_frame
from planner.capture.cuda.triton_kernels import launches_skipped, triton_importable
from planner.capture.patching import all_patched
from planner.capture.wrapped import is_wrapped
from planner.program import NEWEST_TORCH, TorchVersion

META = "meta"
_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_NEW = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")
_META_DEVICE = torch.device(META)
_is_meta = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


@dataclass(slots=True)
class Placement:
    """The state of a simulated GPU: the device that `cuda` maps to, and user code's tensors and streams."""

    target: str = META  # device that `cuda` maps to for tensors that are not on the meta device
    capability: tuple[int, int] = (8, 0)
    torch_version: TorchVersion = NEWEST_TORCH  # version that the job runs
    placed: PlacedTensors = field(default_factory=PlacedTensors)  # tensors on the GPU while a model is built
    is_running: bool = False  # whether the loop runs, whose tensors are not added to `placed`
    host: HostTensors = field(default_factory=HostTensors)  # meta tensors that stand for CPU tensors
    has_values: bool = False  # whether tensors have values, so that copies to the CPU are real
    streams: Streams = field(default_factory=Streams)
    graphs: cuda_graphs.Graphs = field(default_factory=cuda_graphs.Graphs)
    on_empty_cache: Callable[[], None] = lambda: None  # replaced by a recorder's method in `watch`
    on_resize: Callable[[Tensor], None] = lambda tensor: None  # likewise; called with the resized tensor
    remarks: dict[str, str] = field(default_factory=dict)  # remark -> the first line that causes it
    names: Names | None = None  # torch's names that are replaced while a placement is open
    # Work postponed until the set-up is recorded, each with a marker tensor that gives its order.
    put_off: list[tuple[Tensor, Callable[[], None]]] = field(default_factory=list)
    on_cpu: WeakSet[nn.Module] = field(default_factory=WeakSet)  # modules that user code moved to the CPU
    saved: saved_files.SavedFiles = field(default_factory=saved_files.SavedFiles)

    @property
    def stands_for_host(self) -> bool:
        """Return whether new CPU tensors are made on the meta device as stand-ins."""
        return self.is_running and not self.has_values

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the remarks as notes, each preceded by the first line of user code that caused it."""
        return tuple(f"{line} {text}" for text, line in self.remarks.items())

    def watch(self, recorder: Any) -> None:
        """Report emptied caches, resized storages and CUDA graphs to the recorder of the running loop."""
        self.on_empty_cache = recorder.record_empty_cache
        self.on_resize = recorder.record_resize
        self.graphs.open_pool = recorder.graph_pool

    def empty_cache(self) -> None:
        """Report an emptied cache to the recorder if the loop runs; otherwise, log the event in `placed`."""
        if self.is_running:
            self.on_empty_cache()
        else:
            self.placed.add_empty_cache()

    def put(self, tensor: Any) -> Any:
        """Log a tensor that user code puts on the GPU, unless the loop runs, and return the tensor."""
        if isinstance(tensor, Tensor) and not self.is_running:
            self.placed.add(tensor)
        return tensor


_opened: list[Placement] = []  # open placements, innermost last; several if a model is built in a capture


@contextmanager
def planned_device(
    target: str | None = None,
    capability: tuple[int, int] | None = None,
    has_values: bool = False,
    torch_version: TorchVersion | None = None,
) -> Iterator[Placement]:
    """Make `cuda` in user code mean `target`, and torch.cuda answer as the planned GPU, inside the context.

    Arguments that are not given are taken from the enclosing placement, if there is one. Nested placements
    share the tensors that are put on the GPU. `has_values` means that tensors of the capture have values.
    Yields the placement.
    """
    outer = _opened[-1] if _opened else None
    enclosing = Placement() if outer is None else outer
    placement = replace(
        enclosing,
        target=target or enclosing.target,
        capability=capability or enclosing.capability,
        has_values=has_values or enclosing.has_values,
        torch_version=torch_version or enclosing.torch_version,
    )
    names = Names(_replacements()) if outer is None or outer.names is None else outer.names
    placement.names = names
    _opened.append(placement)
    try:
        if outer is not None:
            yield placement
        else:
            names.replace()
            with triton_importable():
                yield placement
    finally:
        if outer is None:
            names.restore()
            placement.saved.close()
        _opened.pop()


@contextmanager
def names_of_torch() -> Iterator[None]:
    """Undo the replacements of torch's functions inside the context, and set them again on exit.

    Needs an open placement.
    """
    names = _opened[-1].names
    assert names is not None
    names.restore()
    try:
        yield
    finally:
        names.replace()


@contextmanager
def devices_shown() -> Iterator[None]:
    """Make meta tensors report the GPU, or the CPU for stand-ins, to user code inside the context."""
    index = Tensor.get_device
    shown: dict[str, Any] = {
        "device": _shown(torch._C.TensorBase.device, _GPU, _CPU),
        "is_cuda": _shown(torch._C.TensorBase.is_cuda, True, False),
        "get_device": lambda tensor: _index_of(tensor) if _is_meta(tensor) else index(tensor),
    }
    _opened.append(replace(_opened[-1], is_running=True))
    try:
        with all_patched(Tensor, shown), launches_skipped():
            yield
    finally:
        _opened.pop()


@contextmanager
def placed_devices_shown() -> Iterator[None]:
    """Make tensors that user code put on the GPU report the GPU to user code inside the context."""
    plain, index = torch._C.TensorBase, Tensor.get_device

    asking: list[None] = []  # not empty while a wrapper lists its parts, which may query the wrapper's device

    def shown(
        read: Any, on_gpu: object, sees_as_it_is: Callable[[FrameType], bool] = is_of_torch
    ) -> property:
        def answer(tensor: Tensor) -> Any:
            if asking or sees_as_it_is(caller_frame()):
                return read.__get__(tensor)
            asking.append(None)
            try:
                return on_gpu if is_put_on_gpu(tensor) else read.__get__(tensor)
            finally:
                asking.pop()

        return property(answer)

    def is_meta_seen(frame: FrameType) -> bool:
        return is_of_torch(frame) and not skips_meta(frame, _opened[-1].torch_version)

    replaced: dict[str, Any] = {
        "device": shown(plain.device, _GPU),
        "is_cuda": shown(plain.is_cuda, True),
        "is_meta": shown(plain.is_meta, False, is_meta_seen),
        "get_device": lambda tensor: 0 if is_put_on_gpu(tensor) else index(tensor),
    }
    with all_patched(Tensor, replaced):
        yield


def is_put_on_gpu(tensor: Tensor) -> bool:
    """Return whether user code put the tensor on the GPU while the model was built."""
    return bool(_opened) and tensor in _opened[-1].placed


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is a meta tensor that stands for a CPU tensor."""
    return bool(_opened) and tensor in _opened[-1].host


def put_off_until_recorded(work: Callable[[], None]) -> bool:
    """Postpone work of a constructor until the set-up is recorded, and return whether it was postponed.

    The work then runs once the tensors that are already on the GPU are recorded. If the loop runs already, or
    no placement is open, nothing is postponed and the caller must run the work itself.
    """
    if not _opened or _opened[-1].is_running:
        return False
    marker = torch.empty(0, device=META)
    _opened[-1].put(marker)
    _opened[-1].put_off.append((marker, work))
    return True


def work_put_off() -> list[tuple[float, Callable[[], None]]]:
    """Return the postponed calls, each with its position among tensors put on the GPU, and clear the list."""
    taken = [(put_order(marker), work) for marker, work in _opened[-1].put_off] if _opened else []
    if taken:
        _opened[-1].put_off.clear()
    return taken


def modules_on_cpu() -> WeakSet[nn.Module]:
    """Return the modules that user code last moved to the CPU while it built the model."""
    return _opened[-1].on_cpu if _opened else WeakSet()


def placed_tensors() -> PlacedTensors:
    """Return the tensors that user code put on the GPU while the model was built."""
    return _opened[-1].placed if _opened else PlacedTensors()


def innermost() -> Placement:
    """Return the placement that was opened last."""
    return _opened[-1]


def put_order(tensor: Tensor) -> float:
    """Return a tensor's position among the tensors that user code put on the GPU while a model was built.

    The position of any other tensor is infinity.
    """
    return _opened[-1].placed.number_of(tensor) if _opened else inf


def _shown(plain: Any, on_gpu: object, on_host: object) -> property:
    read = plain.__get__

    def shown(tensor: Tensor) -> Any:
        if not _is_meta(tensor) or is_of_torch(caller_frame()):
            return read(tensor)
        return on_host if tensor in _opened[-1].host else on_gpu

    return property(shown)


def _index_of(tensor: Tensor) -> int:
    return -1 if tensor in _opened[-1].host else 0


def _target(device: object) -> str:
    """Return the device of the capture that stands for a GPU, and add a remark if its index is not 0."""
    index = device if isinstance(device, int) else torch.device(device).index  # type: ignore[call-overload]
    if index:
        _remark(f"uses cuda:{index}: each GPU stands for the planned one")
    return _opened[-1].target


# ---- replaced names


def _replacements() -> Iterator[Replacement]:
    constructors = _device._device_constructors()  # torch caches the functions that the first call finds
    for holder in (torch, torch.fft):
        for name, value in list(vars(holder).items()):
            if callable(value) and value in constructors:
                yield holder, name, _making(value)
    for name in (*(f"{one}_like" for one in _LIKE), "normal"):
        yield torch, name, _making(getattr(torch, name))
    for name in _NEW:
        yield Tensor, name, _making(getattr(Tensor, name))
    yield Tensor, "to", _moving(Tensor.to)
    yield Tensor, "cuda", _to_gpu
    yield nn.Module, "to", _moving_module(nn.Module.to, _device_given)
    yield nn.Module, "cuda", _moving_module(nn.Module.cuda, lambda *_, **__: _GPU)
    yield nn.Module, "cpu", _moving_module(nn.Module.cpu, lambda *_, **__: _CPU)
    yield Tensor, "_make_wrapper_subclass", staticmethod(_wrapping(Tensor._make_wrapper_subclass))
    yield Tensor, "cpu", _to_host
    yield Tensor, "numpy", _reading_array(Tensor.numpy)
    yield Tensor, "pin_memory", _pin
    yield Tensor, "record_stream", _record_stream
    yield torch, "load", _loading(saved_files.loading(torch.load, _saved_files))
    yield from saved_files.replacements(_saved_files)
    yield _device.DeviceContext, "__init__", _defaulting(_device.DeviceContext.__init__)
    making = _device.DeviceContext.__torch_function__
    yield _device.DeviceContext, "__torch_function__", _putting_defaults(making, constructors)
    yield from device_queries.replacements(
        lambda: _opened[-1].capability,
        _remark,
        lambda: _opened[-1].empty_cache(),
        lambda: _opened[-1].streams,
    )
    yield from cuda_graphs.replacements(
        lambda: _opened[-1].graphs, lambda: _opened[-1].streams, lambda: _opened[-1].on_empty_cache()
    )


def _saved_files() -> saved_files.SavedFiles | None:
    return _opened[-1].saved if _opened else None


def _remark(text: str) -> None:
    _opened[-1].remarks.setdefault(text, line_of_caller())


def _defaulting(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a version of `DeviceContext.__init__` that translates a GPU to the device of the capture."""

    def start(self: Any, device: object) -> None:
        is_gpu = names_gpu(device)
        plain(self, _target(device) if is_gpu else device)
        self.planner_is_gpu = is_gpu

    return start


def _putting_defaults(plain: Callable[..., Any], constructors: Container[Any]) -> Callable[..., Any]:
    """Return a version of `DeviceContext.__torch_function__` that logs tensors made on a default GPU."""

    def run(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_default = func in constructors and (kwargs or {}).get("device") is None  # which `plain` sets
        made = plain(self, func, types, args, kwargs)
        if is_default and _opened and getattr(self, "planner_is_gpu", False):
            _opened[-1].put(made)
        return made

    return run


def keep_default_device() -> None:
    """Keep the GPU as the default device if a constructor set it inside a `with torch.device(...)` region.

    The end of the region would otherwise remove the default device. The new default is `meta`, which stands
    for the GPU.
    """
    chosen = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if getattr(chosen, "planner_is_gpu", False):
        del torch._GLOBAL_DEVICE_CONTEXT.device_context
        torch.set_default_device(META)


def _making(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a tensor factory that translates `cuda` and makes stand-ins for pinned tensors."""

    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        if not _opened:  # an import during a capture bound this function
            return plain(*args, **kwargs)
        if args and isinstance(args[0], list | tuple) and plain.__name__ in ("tensor", "as_tensor"):
            args = (_with_numbers(args[0]), *args[1:])
        device = kwargs.get("device")
        if kwargs.get("pin_memory") or ("pin_memory" in kwargs and _is_of_save_on_cpu()):
            kwargs["pin_memory"] = False
            placement = _opened[-1]
            if placement.stands_for_host and (device is None or names_cpu(device)):
                with placement.host.moving_to(Side.HOST):
                    return placement.host.pin(plain(*args, **{**kwargs, "device": META}))
        if device is not None:
            if not names_gpu(device):
                if _is_layout_alone(device, caller_frame()):
                    with _opened[-1].host.moving_to(Side.HOST):
                        return plain(*args, **kwargs)
                return plain(*args, **kwargs)
            kwargs["device"] = _target(device)
            return _opened[-1].put(plain(*args, **kwargs))
        if any(isinstance(one, torch.device) and one.type == "cuda" for one in args):
            args = tuple(_target(one) if isinstance(one, torch.device) else one for one in args)
            return _opened[-1].put(plain(*args, **kwargs))
        return plain(*args, **kwargs)

    return make


def _with_numbers(data: Any) -> Any:
    """Return nested lists in which scalar meta tensors are replaced by their numbers.

    Without the replacement, torch would read the numbers below Python.
    """
    if isinstance(data, list | tuple):
        return [_with_numbers(one) for one in data]
    return data.item() if isinstance(data, Tensor) and _is_meta(data) and data.dim() == 0 else data


def _is_layout_alone(device: object, caller: FrameType) -> bool:
    """Return whether user code in a running loop names `meta`, for a tensor without memory on any device.

    torch's own code gets the name `meta` from tensors of the GPU.
    """
    is_named = device in (META, _META_DEVICE)
    return is_named and _opened[-1].is_running and not is_of_torch(caller)


def _is_of_save_on_cpu() -> bool:
    """Return whether torch's `save_on_cpu` makes the tensor; it pins memory only if torch finds a GPU."""
    return caller_frame(2).f_globals.get("__name__") == "torch.autograd.graph"


def _moving(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of `Tensor.to` that treats stand-ins as CPU tensors, other meta tensors as GPU's."""

    plain = _by_class(plain)

    @functools.wraps(plain)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = kwargs.get("device", args[0] if args else None)
        if not _opened or place is None:
            return plain(self, *args, **kwargs)
        placement = _opened[-1]
        host = placement.host
        is_gpu, is_cpu = names_gpu(place), names_cpu(place)
        if place == _META_DEVICE and self in host:  # torch's own code knows the GPU by this name
            is_gpu = True
        if isinstance(place, Tensor):
            is_gpu, is_cpu = _is_meta(place) and place not in host, place in host
            if is_cpu:
                args, kwargs = _with_device(META, args, {**kwargs, "dtype": kwargs.get("dtype", place.dtype)})
        elif is_gpu:
            target = _target(place)
            args, kwargs = _with_device(META if _is_meta(self) else target, args, kwargs)
        if not _is_meta(self):
            moved = plain(self, *args, **kwargs)
        elif is_gpu and self in host:
            with host.moving_to(Side.GPU):
                moved = plain(self, *args, **{**kwargs, "copy": True})
        elif is_cpu and not placement.is_running and self in placement.placed:
            args, kwargs = _with_device(META, args, kwargs)
            with placement.placed.copying_to_cpu():
                moved = plain(self, *args, **{**kwargs, "copy": True})
        elif is_cpu and (self in host or not placement.is_running):  # it is on the CPU already
            args, kwargs = _with_device(META, args, kwargs)
            moved = plain(self, *args, **kwargs)
        elif is_cpu and placement.stands_for_host:
            args, kwargs = _with_device(META, args, kwargs)
            with host.moving_to(Side.HOST):
                moved = plain(self, *args, **{**kwargs, "copy": True})
            if kwargs.get("non_blocking"):  # then torch pins it (native/TensorConversions.cpp, _to_copy)
                host.pin(moved)
        else:
            moved = plain(self, *args, **kwargs)
            if is_gpu and not placement.is_running and _is_window(moved) and self not in placement.placed:
                moved = moved.clone()  # which has no more elements than the view
        return placement.put(moved) if is_gpu else moved

    return to


def _is_window(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a part of its storage, such as the result of `hann_window`."""
    if is_wrapped(tensor) or not _is_meta(tensor) or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _by_class(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of a tensor method that wrapper tensors pass to their class, as in torch.

    The class's `__torch_function__` recognizes torch's own method by its identity.
    """

    @functools.wraps(plain)
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_wrapped(self) and torch._C._is_torch_function_enabled():
            kind: Any = type(self)
            return kind.__torch_function__(plain, (kind,), (self, *args), kwargs)
        return plain(self, *args, **kwargs)

    return call


def _wrapping(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of `Tensor._make_wrapper_subclass` that translates the device `cuda`."""

    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if _opened and device is not None and names_gpu(device):
            kwargs["device"] = _target(device)
        return plain(*args, **kwargs)

    return make


def _device_given(*args: Any, **kwargs: Any) -> object:
    """Return the device among the arguments of `Module.to`, or None if they name no device."""
    return torch._C._nn._parse_to(*args, **kwargs)[0]


def _moving_module(
    plain: Callable[..., nn.Module], device_of: Callable[..., object]
) -> Callable[..., nn.Module]:
    """Return a version of a module's move that logs tensors put on the GPU and marks modules put on the CPU.

    `plain` is `to`, `cuda` or `cpu` of `Module`, and `device_of` returns the device that its arguments name.
    If the dtype changes too, a parameter gets new data but remains the object by which it is found later.
    """

    @functools.wraps(plain)
    def move(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        moved = plain(self, *args, **kwargs)
        if not _opened or _opened[-1].is_running:
            return moved
        placement, device = _opened[-1], device_of(*args, **kwargs)
        if names_gpu(device):
            placement.on_cpu -= set(moved.modules())
            for tensor in _in_order_of_apply(moved):
                placement.put(tensor)
        elif names_cpu(device):
            placement.on_cpu |= set(moved.modules())
        return moved

    return move


def _in_order_of_apply(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's parameters and buffers in the order in which `to` moves them: children first."""
    for child in module.children():
        yield from _in_order_of_apply(child)
    held = (*module._parameters.values(), *module._buffers.values())
    yield from [one for one in held if one is not None]


def _with_device(
    device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `Tensor.to` with their device replaced by `device`."""
    if "device" in kwargs:
        return args, {**kwargs, "device": device}
    return (device, *args[1:]), kwargs


def _pin(self: Tensor, device: Any = None) -> Tensor:
    """Return a pinned copy of an unpinned stand-in for a CPU tensor, or any other tensor unchanged."""
    host = _opened[-1].host if _opened else None
    if host is None or self not in host or host.is_pinned(self):
        return self
    with host.moving_to(Side.HOST):
        return host.pin(self.clone())


def _record_stream(self: Tensor, stream: Any) -> None:
    """Add a remark that the stream's work is planned as done before the next memory request."""
    _remark("calls Tensor.record_stream: that stream's work is planned as done when memory is next asked for")


def pinned_like(tensor: Tensor) -> Tensor:
    """Return an unrecorded meta tensor that stands for a pinned CPU tensor like the given tensor."""
    host = _opened[-1].host
    with _disable_current_modes(), host.moving_to(Side.HOST):
        return host.pin(torch.empty_like(tensor, device=META, requires_grad=False))


def _to_host(self: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
    return self.to("cpu", memory_format=memory_format)


def _reading_array(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `Tensor.numpy` that reads the values of a stand-in for a CPU tensor.

    For a tensor of the GPU it raises TypeError in a running loop, unless `force` is set.
    """

    @functools.wraps(plain)
    def numpy(self: Tensor, *, force: bool = False) -> Any:
        if not _opened or not _is_meta(self):
            return plain(self, force=force)
        placement = _opened[-1]
        if not (force or self in placement.host):
            if placement.is_running:
                raise TypeError("a tensor of the GPU is no array, on a GPU either; copy it with .cpu() first")
            return plain(self)
        return plain(torch.ops.aten._to_copy.default(self.detach(), device=_CPU))

    return numpy


def _to_gpu(self: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    return self.to("cuda" if device is None else device, non_blocking=non_blocking, **options)


def _loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `torch.load` that loads to the CPU if `map_location` is a GPU or None."""

    @functools.wraps(plain)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        on_gpu = map_location is None or names_gpu(map_location)
        return plain(f, "cpu" if on_gpu and _opened else map_location, *args, **kwargs)

    return load
