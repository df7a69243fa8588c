"""Log what user code puts on the GPU while a model is built, what it makes of that, and what is freed again.

A model is built without a recorder. The log names each block in its order, so that `planner.capture.setup`
can record all of them, also those that no longer live when the model is there.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from planner.capture.wrapped import calls_operators_itself, parts


@dataclass(frozen=True, slots=True)
class Put:
    """A tensor came onto the GPU."""

    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Called:
    """An operator ran on tensors of the GPU; each tensor is a `Layout`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass(frozen=True, slots=True)
class Freed:
    """The memory of a tensor on the GPU was freed."""

    number: int


@dataclass(frozen=True, slots=True)
class CacheEmptied:
    """`torch.cuda.empty_cache()` was called."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a tensor that the rules of kernels look at, with the number of its storage on the GPU."""

    number: int | None
    size_bytes: int  # of the storage
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


Entry = Put | Called | Freed | CacheEmptied


class PlacedTensors:
    """The tensors on the GPU, by their storages, numbered in the order in which they come there."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()
        self._next = count()
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        self._entries: list[tuple[int, Entry]] = []
        self._is_copying = False  # to the CPU

    def __bool__(self) -> bool:
        return bool(self._numbers.data)

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self) and self.number_of(tensor) < inf

    def add(self, tensor: Tensor) -> None:
        """Number a tensor, unless it or one that it is a view of has a number."""
        for one in parts(tensor):
            storage = _storage_of(one)
            if storage is not None and storage not in self._numbers:
                number = self._start(storage)
                self._entries.append((number, Put(number, storage.nbytes())))

    def add_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Log a call of an operator, and number the tensors that it made."""
        at = next(self._next)
        for one in _tensors_in(out if isinstance(out, tuple | list) else (out,)):
            storage = _storage_of(one)
            if storage is not None and storage not in self._numbers:
                self._start(storage)
        laid = tree_map(self._layout_of, (args, kwargs, out))
        self._entries.append((at, Called(func, *laid)))

    def add_empty_cache(self) -> None:
        """Log that the cache is emptied."""
        if self:
            self._entries.append((next(self._next), CacheEmptied()))

    def number_of(self, tensor: Tensor) -> float:
        """Return the number of a tensor; infinity for one that is not on the GPU."""
        storages = [_storage_of(one) for one in parts(tensor)]
        return min((float(self._numbers[one]) for one in storages if one in self._numbers), default=inf)

    def replace(self, old: Any, new: Tensor) -> None:
        """Give the number of a tensor's storage to another tensor."""
        if old in self._numbers:
            number = self._numbers[old]
            del self._numbers[old]
            self._watch(number, new.untyped_storage())

    def living(self, number: int) -> UntypedStorage | None:
        """Return the storage of this number while it lives."""
        ref = self._alive.get(number)
        return None if ref is None else ref()

    def take_entries(self) -> list[tuple[int, Entry]]:
        """Return what was logged, each with its number in one order, and forget it."""
        entries, self._entries = self._entries, []
        return entries

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """Forget what is logged meanwhile where an error ends it."""
        start = len(self._entries)
        try:
            yield
        except Exception:
            for _, entry in self._entries[start:]:
                if isinstance(entry, Put):
                    self._alive.pop(entry.number, None)
            del self._entries[start:]
            raise

    @contextmanager
    def copying_to_cpu(self) -> Iterator[None]:
        """Log no results of operators while open."""
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    @property
    def follows(self) -> bool:
        """Return whether there are tensors whose results are on the GPU too."""
        return bool(self) and not self._is_copying

    def _start(self, storage: UntypedStorage) -> int:
        number = next(self._next)
        self._watch(number, storage)
        return number

    def _watch(self, number: int, storage: UntypedStorage) -> None:
        self._numbers[storage] = number
        self._alive[number] = weakref.ref(storage, lambda _: self._free(number))

    def _free(self, number: int) -> None:
        if self._alive.pop(number, None) is not None:
            self._entries.append((next(self._next), Freed(number)))

    def _layout_of(self, value: Any) -> Any:
        storage = _storage_of(value) if isinstance(value, Tensor) else None
        if storage is None:
            return value
        at = value.storage_offset()
        number = self._numbers.get(storage, None)  # type: ignore[no-untyped-call]
        laid = tuple(value.shape), tuple(value.stride())
        return Layout(number, storage.nbytes(), *laid, at, value.dtype)


class PlacedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put what operators make of tensors on the GPU there too, while it is the active mode."""

    def __init__(self, placed: PlacedTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placed = placed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as the recorder does: nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(map(calls_operators_itself, types)):
            return NotImplemented
        given = kwargs or {}
        if not self._placed.follows or all(one not in self._placed for one in _tensors_in(args)):
            return func(*args, **given)
        if func in CONVERSIONS:
            with self:
                return func.decompose(*args, **given)
        out = func(*args, **given)
        self._placed.add_call(func, args, given, out)
        return out


class Replayed:
    """The tensors of a log on meta: those that live, and others in place of those that do not."""

    def __init__(self, placed: PlacedTensors) -> None:
        self._placed = placed
        self._dead: dict[int, UntypedStorage] = {}
        self._met: set[int] = set()  # numbers

    def tensors(self, value: Any) -> Any:
        """Return arguments or results with a tensor on meta for each layout."""
        return tree_map(lambda one: self._tensor(one) if isinstance(one, Layout) else one, value)

    def bytes_of(self, put: Put) -> Tensor:
        """Return the tensor that came onto the GPU, as bytes."""
        return self._tensor(Layout(put.number, put.size_bytes, (put.size_bytes,), (1,), 0, torch.uint8))

    def living(self) -> Iterator[Tensor]:
        """Yield a tensor for each storage of the log that lives."""
        for number in sorted(self._met):
            storage = self._placed.living(number)
            if storage is not None and storage.device.type == "meta":
                yield _bytes_of(storage)

    def free(self, number: int) -> None:
        """Let go of a tensor that does not live."""
        self._dead.pop(number, None)

    def _tensor(self, laid: Layout) -> Tensor:
        if laid.number is None:
            return torch.empty_strided(laid.sizes, laid.strides, dtype=laid.dtype, device="meta")
        self._met.add(laid.number)
        storage: Any = self._placed.living(laid.number)
        if storage is None or storage.device.type != "meta":
            fresh = torch.empty(laid.size_bytes, dtype=torch.uint8, device="meta").untyped_storage()
            storage = self._dead.setdefault(laid.number, fresh)
        if storage.nbytes() != laid.size_bytes:  # of another tensor that took over its number
            return _bytes_of(storage)
        made = torch.empty(0, dtype=laid.dtype, device="meta")
        return made.set_(storage, laid.offset, laid.sizes, laid.strides)


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)


# Composites whose schema says that they return a view, though most copy (ATen/native/TensorConversions.cpp).
_TO = torch.ops.aten.to
CONVERSIONS: tuple[Callable[..., Any], ...] = (_TO.dtype, _TO.dtype_layout, _TO.device, _TO.other)


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among values, and among the lists in them."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, Tensor)]


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # of a sparse tensor, or of a lazy parameter
        return None
