"""Index tensors by full slices as torch before 2.9 does.

An example is `x[:, 0]`. Before 2.9, `:` runs a slice operator, whose gradient is a tensor of zeros into which
the gradient is copied. Since 2.9 a full slice runs no operator (applySlice, ATen/TensorIndexing.h;
pytorch/pytorch#157944).
"""

from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from planner.program import TorchVersion

_SKIPPED_SINCE: TorchVersion = (2, 9)
_END = 2**63 - 1
_get_item = Tensor.__getitem__


def patches(version: TorchVersion) -> Iterator[tuple[str, object]]:
    """Yield the name and the replacement of `Tensor.__getitem__` if `version` is before 2.9."""
    if version < _SKIPPED_SINCE:
        yield "torch.Tensor.__getitem__", _index


def _index(x: Tensor, index: Any) -> Any:
    """Return `x[index]`, computed with one slice operator for each full slice if `x` is a meta tensor."""
    places = index if isinstance(index, tuple) else (index,)
    if x.device.type != "meta" or not any(isinstance(place, slice) for place in places):
        return _get_item(x, index)
    if any(isinstance(place, list | tuple | Tensor | bool) for place in places):
        return _get_item(_sliced_at_once(x, places), index)
    after = sum(isinstance(place, int | slice | torch.SymInt) for place in places)
    dim = 0
    for place in places:
        if isinstance(place, EllipsisType):
            dim = x.dim() - after
        elif _is_full(place, x, dim):
            x = torch.ops.aten.slice(x, dim, 0, _END, 1)
        elif place is None:
            x = x.unsqueeze(dim)
        else:
            x = _get_item(x, (*[slice(None)] * dim, place))
        after -= isinstance(place, int | slice | torch.SymInt)
        dim += not isinstance(place, int | torch.SymInt | EllipsisType)
    return x


def _sliced_at_once(x: Tensor, places: Sequence[Any]) -> Tensor:
    """Return `x` after one slice operator for each full slice of an index."""
    dim = 0
    for position, place in enumerate(places):
        if isinstance(place, EllipsisType):
            dim = x.dim() - sum(map(_dimensions, places[position + 1 :]))
        elif _is_full(place, x, dim):
            x = torch.ops.aten.slice(x, dim, 0, _END, 1)
        dim += _dimensions(place)
    return x


def _dimensions(place: Any) -> int:
    """Return the number of tensor dimensions that one part of an index consumes."""
    if place is None or isinstance(place, bool | EllipsisType):
        return 0
    return place.dim() if isinstance(place, Tensor) and place.dtype in (torch.bool, torch.uint8) else 1


def _is_full(place: Any, x: Tensor, dim: int) -> bool:
    """Return whether one part of an index is a full slice that runs a slice operator before 2.9.

    Versions before 2.9 run no operator if the slice's end equals the size of the dimension.
    """
    if not isinstance(place, slice) or not (_is_number(place.start, 0) and _is_number(place.step, 1)):
        return False
    return place.stop is None or (isinstance(place.stop, int) and place.stop > x.shape[dim])


def _is_number(value: Any, default: int) -> bool:
    """Return whether a slice's start or step is None or equal to its default."""
    return value is None or (isinstance(value, int) and value == default)
