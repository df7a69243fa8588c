"""Log the tensors that user code puts on the GPU while a model is built.

The log also has operators on these tensors, and frees. A model is built without a recorder. The log lists all
blocks in their order, so that `planner.capture.setup` can record them later, including the blocks that are
freed before the model is complete.
"""

import weakref
from collections.abc import Iterator
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

from planner.capture.beneath_autograd import as_without_gradients, is_composite
from planner.capture.cuda.operators.rejections import Rejections
from planner.capture.meta_kernels.calls import call_operator
from planner.capture.wrapped import calls_operators_itself, parts


@dataclass(frozen=True, slots=True)
class Put:
    """Log entry: the storage with this number and size was put on the GPU."""

    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Called:
    """Log entry: an operator ran on tensors of the GPU; each tensor is given as a `Layout`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass(frozen=True, slots=True)
class Freed:
    """Log entry: the storage with this number was freed."""

    number: int


@dataclass(frozen=True, slots=True)
class CacheEmptied:
    """Log entry: `torch.cuda.empty_cache()` was called."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout and dtype of a logged tensor. It has the number of its storage if that is on the GPU."""

    number: int | None  # None if the tensor is not on the GPU
    size_bytes: int  # of the storage
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


Entry = Put | Called | Freed | CacheEmptied


class PlacedTensors:
    """The storages that user code put on the GPU, numbered in order, and a log of their events."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()
        self._next = count()
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        self._entries: list[tuple[int, Entry]] = []
        self._is_copying = False  # whether a copy to the CPU runs

    def __bool__(self) -> bool:
        return bool(self._numbers.data)

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self) and self.number_of(tensor) < inf

    def has_storage(self, storage: UntypedStorage) -> bool:
        """Return whether a storage is on the GPU."""
        return storage in self._numbers

    def add(self, tensor: Tensor) -> None:
        """Number a tensor's storages and log them as put on the GPU, unless they have a number already."""
        for one in parts(tensor):
            storage = _storage_of(one)
            if storage is not None and storage not in self._numbers:
                number = self._start(storage)
                self._entries.append((number, Put(number, storage.nbytes())))

    def add_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Log a call of an operator, and number the storages of its new tensors."""
        at = next(self._next)
        for one in _tensors_in(out if isinstance(out, tuple | list) else (out,)):
            storage = _storage_of(one)
            if storage is not None and storage not in self._numbers:
                self._start(storage)
        laid = tree_map(self._layout_of, (args, kwargs, out))
        self._entries.append((at, Called(func, *laid)))

    def add_empty_cache(self) -> None:
        """Log that the cache is emptied, if any tensor is on the GPU."""
        if self:
            self._entries.append((next(self._next), CacheEmptied()))

    def number_of(self, tensor: Tensor) -> float:
        """Return the lowest number of a tensor's storages, or infinity if none is on the GPU."""
        storages = [_storage_of(one) for one in parts(tensor)]
        return min((float(self._numbers[one]) for one in storages if one in self._numbers), default=inf)

    def replace(self, old: Any, new: Tensor) -> None:
        """Transfer the number of storage `old`, if any, to the storage of tensor `new`."""
        if old in self._numbers:
            number = self._numbers[old]
            del self._numbers[old]
            self._watch(number, new.untyped_storage())

    def living(self, number: int) -> UntypedStorage | None:
        """Return the storage with a number, or None if it was freed."""
        ref = self._alive.get(number)
        return None if ref is None else ref()

    def take_entries(self) -> list[tuple[int, Entry]]:
        """Return the log as (number in the order of all events, entry) pairs, and clear it."""
        entries, self._entries = self._entries, []
        return entries

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """Remove the entries logged inside the context if an exception leaves it."""
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
        """Do not log the operators inside the context, since they copy to the CPU."""
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    @property
    def follows(self) -> bool:
        """Return whether to log operators: some tensor is on the GPU, and no copy to the CPU is running."""
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
        laid = tuple(value.size()), tuple(value.stride())
        return Layout(number, storage.nbytes(), *laid, at, value.dtype)


class PlacedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that logs operators on GPU tensors, and counts their results as on the GPU."""

    def __init__(self, placed: PlacedTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placed = placed
        self._rejections = Rejections()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since nothing is compiled while the mode is active.

        The recorder does the same.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(map(calls_operators_itself, types)):
            return NotImplemented
        given = kwargs or {}
        if not self._placed.follows or all(one not in self._placed for one in _tensors_in(args)):
            return func(*args, **given)
        if func is _COPY and args[0] not in self._placed:  # into a tensor of the CPU
            return func(*args, **given)
        if is_composite(func):
            with as_without_gradients(), self:
                return func(*args, **given)
        if func is _READ and args[0].is_meta:
            is_rejected = self._rejections.answer()
            if is_rejected is not None:
                return is_rejected
        out = call_operator(func, args, given)
        self._placed.add_call(func, args, given, out)
        return out


class Replayed:
    """The tensors of a log, rebuilt on the meta device. Storages that have been freed get stand-ins."""

    def __init__(self, placed: PlacedTensors) -> None:
        self._placed = placed
        self._dead: dict[int, UntypedStorage] = {}
        self._met: set[int] = set()  # numbers of the storages of rebuilt tensors

    def tensors(self, value: Any) -> Any:
        """Return logged values with each `Layout` replaced by a meta tensor.

        The values are arguments or results.
        """
        return tree_map(lambda one: self._tensor(one) if isinstance(one, Layout) else one, value)

    def bytes_of(self, put: Put) -> Tensor:
        """Return the storage of a `Put` entry as a tensor of bytes."""
        return self._tensor(Layout(put.number, put.size_bytes, (put.size_bytes,), (1,), 0, torch.uint8))

    def living(self) -> Iterator[Tensor]:
        """Yield each living meta storage of the rebuilt tensors, as a tensor of bytes."""
        for number in sorted(self._met):
            storage = self._placed.living(number)
            if storage is not None and storage.device.type == "meta":
                yield _bytes_of(storage)

    def free(self, number: int) -> None:
        """Release the stand-in for the freed storage with a number, if there is one."""
        self._dead.pop(number, None)

    def _tensor(self, laid: Layout) -> Tensor:
        if laid.number is None:
            return torch.empty_strided(laid.sizes, laid.strides, dtype=laid.dtype, device="meta")
        self._met.add(laid.number)
        storage: Any = self._placed.living(laid.number)
        if storage is None or storage.device.type != "meta":
            fresh = torch.empty(laid.size_bytes, dtype=torch.uint8, device="meta").untyped_storage()
            storage = self._dead.setdefault(laid.number, fresh)
        if storage.nbytes() != laid.size_bytes:  # the storage of another tensor that took over the number
            return _bytes_of(storage)
        made = torch.empty(0, dtype=laid.dtype, device="meta")
        return made.set_(storage, laid.offset, laid.sizes, laid.strides)


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)


_READ = torch.ops.aten._local_scalar_dense.default
_COPY = torch.ops.aten.copy_.default


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among the values, and among the items of lists and tuples in the values."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, Tensor)]


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # of a sparse tensor, or of a lazy parameter
        return None
