"""Replace tensor types such as `torch.cuda.FloatTensor`, and the functions that take their names."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from planner.capture.cuda.devices.placement import is_meta, opened
from planner.capture.cuda.names import Replacement

_MODULE = "torch.cuda"
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch.cuda, name).dtype for name in vars(torch.cuda) if name.endswith("Tensor")
}


class GpuTensorType(type):
    """The metaclass of the stand-ins for `torch.cuda.FloatTensor` and the other types of tensors of a GPU."""

    dtype: torch.dtype
    is_cuda = True

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, Tensor) and one.dtype is cls.dtype and _is_on_gpu(one)

    def __call__(cls, *values: Any, **_: Any) -> Tensor:
        """Return a tensor of the GPU with the given values or sizes, as the original type does."""
        is_given = len(values) == 1 and not isinstance(values[0], int | torch.Size)
        if is_given:
            return torch.tensor(values[0], dtype=cls.dtype, device="cuda")
        sizes = values[0] if values and not isinstance(values[0], int) else values or (0,)
        return torch.empty(sizes, dtype=cls.dtype, device="cuda")


def replacements() -> Iterator[Replacement]:
    """Yield replacements for the tensor types of `torch.cuda` and the functions that take them."""
    for name, dtype in _DTYPES.items():
        yield torch.cuda, name, GpuTensorType(name, (), {"dtype": dtype, "__module__": _MODULE})
    yield Tensor, "type", _typing(Tensor.type)
    yield torch, "set_default_tensor_type", _defaulting(torch.set_default_tensor_type)


def _defaulting(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a version of `torch.set_default_tensor_type` that accepts types of tensors of the GPU.

    The GPU then becomes the default device.
    """

    @functools.wraps(plain)
    def set_type(t: Any, /) -> None:
        module, _, kind = _name_of(t).rpartition(".")
        is_gpu = module == _MODULE and kind in _DTYPES
        plain(f"torch.{kind}" if is_gpu else t)
        torch.set_default_device("cuda" if is_gpu else None)

    return set_type


def _is_on_gpu(tensor: Tensor) -> bool:
    placement = opened[-1]
    if placement.is_running and is_meta(tensor):
        return tensor not in placement.host
    return tensor in placement.placed


def _typing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `Tensor.type` that names and accepts types of tensors of the GPU."""

    @functools.wraps(plain)
    def type_of(self: Tensor, dtype: Any = None, non_blocking: bool = False, **given: Any) -> Any:
        if dtype is None:
            name: str = plain(self)
            kind = name.rpartition(".")[2]
            return f"{_MODULE}.{kind}" if _is_on_gpu(self) else name.replace("torch.meta.", "torch.")
        module, _, kind = _name_of(dtype).rpartition(".")
        if module == _MODULE and kind in _DTYPES:
            return self.to("cuda", _DTYPES[kind], non_blocking)
        if module == "torch" and kind in _DTYPES:
            return self.to("cpu", _DTYPES[kind], non_blocking)
        return plain(self, dtype, non_blocking, **given)

    return type_of


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, type):
        return f"{dtype.__module__}.{dtype.__name__}"
    return dtype if isinstance(dtype, str) else ""
