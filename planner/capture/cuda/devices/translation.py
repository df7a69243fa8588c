"""Translate the device `cuda` in user code to the device of the capture.

Most files name the GPU: `device="cuda"`, `.cuda()`, `x.device.type == "cuda"`. A `TorchFunctionMode` would
see such calls, but a mode also disables torch's fast paths (`has_torch_function`), which changes memory.
Instead, Python functions that make tensors, move them, or return their device are replaced. torch's own code
and the planner's code see the tensors' true device, `meta`.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils import _device

from planner.capture.cuda import graphs as cuda_graphs, jit_trace
from planner.capture.cuda.callers import is_of_torch, moves_tensors, skips_meta
from planner.capture.cuda.checkpoints import functions as checkpoints
from planner.capture.cuda.checkpoints.saved_files import SavedFiles
from planner.capture.cuda.devices import factories, moves, queries, tensor_types, uninitialized
from planner.capture.cuda.devices.names import HOST_DEVICE
from planner.capture.cuda.devices.placement import (
    CPU,
    GPU,
    Placement,
    add_remark,
    is_meta,
    is_put_on_gpu,
    opened,
)
from planner.capture.cuda.names import Names, Replacement
from planner.capture.cuda.threads import caller_frame
from planner.capture.cuda.triton_kernels import launches_skipped, triton_importable
from planner.capture.patching import all_patched
from planner.capture.wrapped import is_wrapped
from planner.program import TorchVersion

_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_NEW = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


@contextmanager
def planned_device(
    target: str | None = None,
    capability: tuple[int, int] | None = None,
    has_values: bool = False,
    torch_version: TorchVersion | None = None,
) -> Iterator[Placement]:
    """Make `cuda` mean the planned GPU to user code inside the context.

    Tensors go to the device `target`, and torch.cuda answers as the planned GPU. Arguments that are not given
    are taken from the enclosing placement, if there is one. Nested placements share the tensors that are put
    on the GPU. `has_values` means that tensors of the capture have values. Yields the placement.
    """
    outer = opened[-1] if opened else None
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
    opened.append(placement)
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
        opened.pop()


@contextmanager
def names_of_torch() -> Iterator[None]:
    """Undo the replacements of torch's functions inside the context.

    They are set again on exit. Needs an open placement.
    """
    names = opened[-1].names
    assert names is not None
    names.restore()
    try:
        yield
    finally:
        names.replace()


@contextmanager
def devices_shown() -> Iterator[None]:
    """Make meta tensors report the GPU, or the CPU if they stand for CPU tensors, to user code inside.

    In the context the placement counts as running, and Triton kernels are not launched.
    """
    index = Tensor.get_device
    shown: dict[str, Any] = {
        "device": _shown(torch._C.TensorBase.device, GPU, CPU),
        "is_cuda": _shown(torch._C.TensorBase.is_cuda, True, False),
        "get_device": lambda tensor: _index_of(tensor) if is_meta(tensor) else index(tensor),
    }
    opened.append(replace(opened[-1], is_running=True))
    try:
        with all_patched(Tensor, shown), launches_skipped():
            yield
    finally:
        opened.pop()


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
        return is_of_torch(frame) and not skips_meta(frame, opened[-1].torch_version)

    replaced: dict[str, Any] = {
        "device": shown(plain.device, GPU),
        "is_cuda": shown(plain.is_cuda, True),
        "is_meta": shown(plain.is_meta, False, is_meta_seen),
        "get_device": lambda tensor: 0 if is_put_on_gpu(tensor) else index(tensor),
    }
    with all_patched(Tensor, replaced):
        yield


def _shown(plain: Any, on_gpu: object, on_host: object) -> property:
    read = plain.__get__

    def shown(tensor: Tensor) -> Any:
        if not is_meta(tensor):
            return read(tensor)
        caller = caller_frame()
        if not is_of_torch(caller):
            return on_host if tensor in opened[-1].host else on_gpu
        if on_host is CPU and moves_tensors(caller) and not is_wrapped(tensor) and tensor in opened[-1].host:
            return HOST_DEVICE
        return read(tensor)

    return property(shown)


def _index_of(tensor: Tensor) -> int:
    return -1 if tensor in opened[-1].host else 0


def _saved_files() -> SavedFiles | None:
    return opened[-1].saved if opened else None


def _replacements() -> Iterator[Replacement]:
    constructors = _device._device_constructors()  # torch caches the functions that the first call finds
    for holder in (torch, torch.fft):
        for name, value in list(vars(holder).items()):
            if callable(value) and value in constructors:
                yield holder, name, factories.making(value)
    for name in (*(f"{one}_like" for one in _LIKE), "normal"):
        yield torch, name, factories.making(getattr(torch, name))
    for name in _NEW:
        yield Tensor, name, factories.making(getattr(Tensor, name))
    yield Tensor, "to", moves.moving(Tensor.to)
    yield Tensor, "type_as", moves.to_type_of
    yield Tensor, "cuda", moves.to_gpu
    yield from tensor_types.replacements()
    yield from uninitialized.replacements()
    for name in ("pack_padded_sequence", "pad_packed_sequence"):
        yield rnn, name, moves.staying(getattr(rnn, name))
    yield torch.jit, "trace", jit_trace.tracing(torch.jit.trace, add_remark)
    yield nn.Module, "to", moves.moving_module(nn.Module.to, moves.device_given)
    yield nn.Module, "cuda", moves.moving_module(nn.Module.cuda, lambda *_, **__: GPU)
    yield nn.Module, "cpu", moves.moving_module(nn.Module.cpu, lambda *_, **__: CPU)
    yield Tensor, "_make_wrapper_subclass", staticmethod(factories.wrapping(Tensor._make_wrapper_subclass))
    yield Tensor, "cpu", moves.to_host
    yield Tensor, "numpy", moves.reading_array(Tensor.numpy)
    yield torch.UntypedStorage, "cuda", moves.storage_to_gpu
    yield Tensor, "pin_memory", moves.pin
    yield Tensor, "record_stream", moves.record_stream
    yield pickle, "load", moves.unpickling(pickle.load)
    yield pickle, "loads", moves.unpickling(pickle.loads)
    yield torch.serialization, "location_tag", moves.locating(torch.serialization.location_tag)
    yield torch, "load", moves.loading(checkpoints.loading(torch.load, _saved_files))
    yield from checkpoints.replacements(_saved_files)
    yield _device.DeviceContext, "__init__", factories.defaulting(_device.DeviceContext.__init__)
    making = _device.DeviceContext.__torch_function__
    yield _device.DeviceContext, "__torch_function__", factories.putting_defaults(making, constructors)
    yield from queries.replacements(
        lambda: opened[-1].capability,
        add_remark,
        lambda: opened[-1].empty_cache(),
        lambda: opened[-1].streams,
    )
    yield from cuda_graphs.replacements(
        lambda: opened[-1].graphs, lambda: opened[-1].streams, lambda: opened[-1].on_empty_cache()
    )
