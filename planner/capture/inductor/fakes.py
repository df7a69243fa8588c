"""Show the capture's meta tensors to torch's compiler as tensors on `cuda:0`.

Dynamo, AOTAutograd and inductor work on fake tensors, whose device is a label in Python: here `cuda:0` for
all meta tensors. Fake tensors have the dispatch keys of CUDA, but report `meta` as their device to C++:
autograd gets the stream of a tensor's device, which a build of torch without CUDA refuses (InputMetadata,
torch/csrc/autograd/input_metadata.cpp). Tensors that C++ then makes on the meta device are labelled `cuda:0`
again.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor, meta_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from planner.capture.beneath_autograd import COMPOSITE_WITH_CUDA_KERNEL
from planner.capture.patching import kernels_registered, patched

GPU = torch.device("cuda", 0)
META = torch.device("meta")
_DEVICE, _DISPATCHES_DEVICE = 6, 10  # positions among the arguments of `_make_wrapper_subclass`
_Patch = tuple[Any, str, Any]


@contextmanager
def fakes_on_gpu() -> Iterator[None]:
    """Label the fake counterparts of meta tensors as tensors on `cuda:0` inside the context."""
    with ExitStack() as stack:
        wrappers = _Wrappers(stack)
        for holder, name, new in _patches(wrappers):
            stack.enter_context(patched(holder, name, new, create=True))
        handlers = {torch.ops.prim.device.default: lambda args: _in_c(args[0].fake_device)}
        stack.enter_context(mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, handlers))
        stack.enter_context(_composites_kept())
        yield


def _composites_kept() -> AbstractContextManager[None]:
    """Register CUDA kernels, which are never called, to keep autograd from decomposing their operators.

    If a device has no kernel for an operator, the dispatcher uses the composite kernel at its autograd key
    (ATen/core/dispatch/OperatorEntry.cpp, computeDispatchTableEntryWithDebug). AOTAutograd also queries
    the dispatcher about decompositions (torch/utils/_python_dispatch.py, autograd_would_have_decomposed).
    """
    return kernels_registered(dict.fromkeys(COMPOSITE_WITH_CUDA_KERNEL, _never), "CUDA")


def _never(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a kernel for CUDA was called on a fake tensor")


def _patches(wrappers: "_Wrappers") -> Iterator[_Patch]:
    yield (
        meta_utils.MetaTensorDescriber,
        "describe_tensor",
        _describing(meta_utils.MetaTensorDescriber.describe_tensor),
    )
    yield Tensor, "_make_wrapper_subclass", _wrapping(Tensor._make_wrapper_subclass, wrappers)
    dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__
    yield FakeTensor, "__torch_dispatch__", classmethod(_answering_device(dispatch))
    functional = FunctionalTensor.__torch_dispatch__
    yield FunctionalTensor, "__torch_dispatch__", _answering(functional)
    yield FakeTensorMode, "dispatch", _relabelling(FakeTensorMode.dispatch)
    # Tensors of Python numbers are made on the CPU and moved, although CUDA is reported as available.
    yield FakeTensorMode, "avoid_device_init", property(lambda mode: True)
    for mode in (FunctionalTensorMode, ProxyTorchDispatchMode):
        yield mode, "__torch_dispatch__", _relabelling(mode.__torch_dispatch__)
    yield FunctionalTensor, "device", property(lambda tensor: _inner(tensor).device)
    for kind in (FakeTensor, FunctionalTensor):
        yield kind, "is_cuda", property(lambda tensor: tensor.device.type == "cuda")
        yield kind, "is_meta", property(lambda tensor: tensor.device.type == "meta")


def _in_c(device: torch.device) -> torch.device:
    return META if device.type == "cuda" else device


def _inner(tensor: FunctionalTensor) -> Tensor:
    inner: Tensor = tensor.elem
    return torch._from_functional_tensor(inner) if torch._is_functional_tensor(inner) else inner


def _describing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def describe(self: Any, tensor: Tensor, **options: Any) -> Any:
        described = plain(self, tensor, **options)
        return dataclasses.replace(described, device=GPU) if described.device.type == "meta" else described

    return describe


class _Wrappers:
    """Classes of wrapper tensors that are labelled as `cuda:0`. Float8 weights are an example."""

    def __init__(self, stack: ExitStack) -> None:
        """Store `stack`, which removes the labels when it closes."""
        self._stack = stack
        self._labelled: set[type[Tensor]] = set()

    def label(self, kind: type[Tensor]) -> None:
        """Make tensors of a class report `cuda:0` as their device to Python, and `meta` to C++."""
        if kind in self._labelled:
            return
        self._labelled.add(kind)
        dispatch = kind.__torch_dispatch__.__func__  # type: ignore[attr-defined]
        for name, new in (
            ("__torch_dispatch__", classmethod(_answering_device(dispatch))),
            ("device", property(lambda tensor: GPU)),
            ("is_cuda", property(lambda tensor: True)),
            ("is_meta", property(lambda tensor: False)),
        ):
            self._stack.enter_context(patched(kind, name, new, create=True))


def _wrapping(plain: Callable[..., Tensor], wrappers: _Wrappers) -> Callable[..., Tensor]:
    def make(cls: type[Tensor], *args: Any, **options: Any) -> Tensor:
        given = list(args)
        if issubclass(cls, FunctionalTensor):
            given[_DISPATCHES_DEVICE] = True
            if given[_DEVICE].type == "meta":  # as reported by C++
                given[_DEVICE] = GPU
            return plain(cls, *given, **options)
        device = options.get("device")
        if issubclass(cls, FakeTensor) or device is None or torch.device(device).type == "cpu":
            return plain(cls, *args, **options)
        wrappers.label(cls)
        return plain(cls, *args, **{**options, "device": GPU, "dispatch_device": True})

    return make


def _answering_device(plain: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(
        cls: type[Tensor], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return _in_c(args[0].device)
        return plain(cls, func, types, args, kwargs or {})

    return dispatch


def _answering(plain: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _in_c(args[0].device)
        return plain(self, func, types, args, kwargs)

    return dispatch


def _relabelling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _in_c(args[0].device)
        device = kwargs.get("device") if kwargs else None
        if device is not None and torch.device(device).type == "meta":
            kwargs = {**kwargs, "device": GPU}
        return plain(self, func, types, args, kwargs)

    return dispatch
