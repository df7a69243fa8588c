"""Tensors that user code puts on the GPU while a model is built, and what it makes of them."""

from itertools import count
from math import inf
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from planner.capture.wrapped import calls_operators_itself, parts


class PlacedTensors:
    """The tensors on the GPU, by their storages, numbered in the order in which they come there."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()
        self._next = count()

    def __bool__(self) -> bool:
        return bool(self._numbers.data)

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self) and self.number_of(tensor) < inf

    def add(self, tensor: Tensor) -> None:
        """Number a tensor, unless it or one that it is a view of has a number."""
        for one in parts(tensor):
            storage = _storage_of(one)
            if storage is not None and storage not in self._numbers:
                self._numbers[storage] = self.next_number()

    def next_number(self) -> int:
        """Return a number for what happens now."""
        return next(self._next)

    def number_of(self, tensor: Tensor) -> float:
        """Return the number of a tensor; infinity for one that is not on the GPU."""
        storages = [_storage_of(one) for one in parts(tensor)]
        return min((float(self._numbers[one]) for one in storages if one in self._numbers), default=inf)

    def replace(self, old: Any, new: Tensor) -> None:
        """Give the number of a tensor's storage to another tensor."""
        if old in self._numbers:
            self._numbers[new.untyped_storage()] = self._numbers[old]
            del self._numbers[old]


class PlacedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put what operators make of tensors on the GPU there too, while it is the active mode."""

    def __init__(self, placed: PlacedTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placed = placed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(map(calls_operators_itself, types)):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if self._placed and any(one in self._placed for one in _tensors_in(args)):
            for one in _tensors_in(out if isinstance(out, tuple | list) else (out,)):
                self._placed.add(one)
        return out


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among values, and among the lists in them."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, Tensor)]


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # of a sparse tensor, or of a lazy parameter
        return None
