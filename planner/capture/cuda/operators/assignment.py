"""Assign a number to a part of a meta tensor, with CUDA's allocations.

`x[1:2] = 3` makes a tensor of the number first: on the CPU if `x` is on CUDA, otherwise on the device of `x`
(THPVariable_setitem, torch/csrc/autograd/python_variable_indexing.cpp). On `meta` this tensor would count as
a block of the GPU. With a single mask, `x[x > 0] = 3` or `x[mask, :] = 3`, the number fills `x` in place
(`canDispatchToMaskedFill`, ATen/native/TensorAdvancedIndexing.cpp); autograd still records an assignment.
"""

from collections.abc import Iterator
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

_set_item = Tensor.__setitem__
_BASIC = (int, slice, EllipsisType, type(None), torch.SymInt)


def patches() -> Iterator[tuple[str, object]]:
    """Yield the name of `Tensor.__setitem__` and its replacement."""
    yield "torch.Tensor.__setitem__", _assign


def _assign(x: Tensor, index: Any, value: Any) -> None:
    """Run `x[index] = value`, with the allocations of CUDA if `x` is on meta and `value` is a number.

    If the index contains tensors or lists, other than a single mask, a number is copied to the GPU, as on
    CUDA.
    """
    places = index if isinstance(index, tuple) and index else (index,)
    is_number = x.device.type == "meta" and isinstance(value, bool | int | float | complex)
    mask = places[0] if _is_mask(places[0]) and all(_is_whole(place) for place in places[1:]) else None
    if is_number and mask is not None and not (torch.is_grad_enabled() and x.requires_grad):
        x.masked_fill_(mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim())), value)
        return
    is_basic = all(isinstance(place, _BASIC) and not isinstance(place, bool) for place in places)
    if is_number and is_basic:
        value = torch.scalar_tensor(value, dtype=x.dtype, device="cpu")
    _set_item(x, index, value)


def _is_mask(place: Any) -> bool:
    return isinstance(place, Tensor) and place.dtype in (torch.bool, torch.uint8)


def _is_whole(place: Any) -> bool:
    return isinstance(place, slice) and place == slice(None)
