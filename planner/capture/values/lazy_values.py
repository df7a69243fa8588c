"""Values of storages on `meta`, computed on the CPU when they are read.

Each storage has a `StorageValue`: a deferred operator with its arguments, or bytes once they are computed. A
write in place makes a new value, so that older operators still see what they got.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from planner.capture.arguments import leaves_of, map_leaves
from planner.capture.values.nms import nms
from planner.errors import BatchTooLargeError

MOST_BYTES = 2**31  # of one storage whose values are read
# Parts of names of operators whose results are random: those that multiply by weights.
RANDOMIZED_OPS = (
    *("convolution", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "addmv", "aten::mv"),
    *("scaled_dot_product", "_grouped_mm", "_cudnn_rnn", "roi_align"),
)
_UNBOUNDED = ("log", "div", "reciprocal", "exp", "sqrt", "pow")  # may leave the finite numbers
_OWN_KERNELS: dict[str, Callable[..., Any]] = {"torchvision::nms": nms}  # which some torch has none for


@dataclass(slots=True, weakref_slot=True, eq=False)
class StorageValue:
    """The value of a storage: bytes once they are read, before that the operator that makes them."""

    size_bytes: int
    dtype: torch.dtype
    made_by: "DeferredOp | None" = None  # None: unknown, so the value is random
    storage: torch.UntypedStorage | None = None
    is_random: bool = False  # the bytes come from random ones


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as an operator got it: a view of a value that later writes leave alone."""

    value: StorageValue
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def layout(self) -> "TensorView":
        """Return the layout alone, which keeps no value alive."""
        return TensorView(StorageValue(0, self.dtype), self.dtype, self.size, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class DeferredOp:
    """An operator with its arguments, and the values that running it gives."""

    func: Any
    args: tuple[Any, ...]  # meta tensors as `TensorView`, here and in `kwargs`
    kwargs: dict[str, Any]
    is_randomized: bool
    written: list[tuple[StorageValue, "weakref.ref[StorageValue]"]] = field(default_factory=list)  # old, new
    made: list[tuple[int, TensorView, "weakref.ref[StorageValue]"]] = field(default_factory=list)

    @property
    def inputs(self) -> list[StorageValue]:
        if self.is_randomized:
            return []
        return [one.value for one in leaves_of(self.args, self.kwargs) if isinstance(one, TensorView)]

    def arguments(self, replace: Callable[[TensorView], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def change(leaf: Any) -> Any:
            return replace(leaf) if isinstance(leaf, TensorView) else leaf

        args, kwargs = map_leaves(change, (self.args, self.kwargs))
        return args, kwargs


def compute(op: DeferredOp) -> tuple[Any, dict[int, torch.UntypedStorage]]:
    """Run the operator on the CPU; returns its result and its copies of what it writes, by the old value."""
    written = {id(view.value) for view in written_arguments(op.func, op.args, op.kwargs)}
    copies: dict[int, torch.UntypedStorage] = {}

    def real(view: TensorView) -> Tensor:
        storage, key = view.value.storage, id(view.value)
        assert storage is not None
        if key in written:
            storage = copies.setdefault(key, storage.clone())  # type: ignore[no-untyped-call]
        return view.on(storage)

    args, kwargs = op.arguments(real)
    return _OWN_KERNELS.get(op.func._schema.name, op.func)(*args, **kwargs), copies


def run(op: DeferredOp) -> None:
    """Run an operator and store its results in the values that still live.

    Values of operators that are randomized or that the CPU cannot run stay unknown.
    """
    if op.is_randomized:
        return
    try:
        out, copies = compute(op)
    except (NotImplementedError, RuntimeError, IndexError):
        return
    is_random = any(value.is_random for value in op.inputs)
    for old, reference in op.written:
        new = reference()
        if new is not None:
            new.storage, new.is_random = copies[id(old)], is_random or old.is_random
    results = leaves_of(out)
    for index, layout, reference in op.made:
        value = reference()
        if value is not None:
            result = _finite(op.func, results[index]) if is_random else results[index]
            value.storage, value.is_random = _laid_out(result, layout, value.size_bytes), is_random


def materialize(value: StorageValue) -> bool:
    """Compute a value and all that it depends on; returns whether any had to be random."""
    is_any_random = False
    waiting = [value]  # deep chains need no recursion
    while waiting:
        value = waiting[-1]
        op = value.made_by
        if value.storage is None:
            missing = [] if op is None else [one for one in op.inputs if one.storage is None]
            if missing:
                waiting.extend(missing)
                continue
            if op is not None:
                run(op)
            if value.storage is None:
                value.storage = randomize(value)
                is_any_random = True
            value.made_by = None
        waiting.pop()
    return is_any_random


def inspect_pending(values: Sequence[StorageValue]) -> tuple[int, bool]:
    """Return the bytes of the largest value to compute for these, and whether any comes from random ones."""
    waiting, seen = [*values], {id(value) for value in values}
    largest, is_random = 0, False
    while waiting:
        value = waiting.pop()
        if value.storage is not None:
            is_random |= value.is_random
            continue
        largest = max(largest, value.size_bytes)
        op = value.made_by
        if op is None or op.is_randomized:
            is_random = True
            continue
        for needed in op.inputs:
            if id(needed) not in seen:
                seen.add(id(needed))
                waiting.append(needed)
    return largest, is_random


def randomize(value: StorageValue) -> torch.UntypedStorage:
    """Return normal floats; whole numbers are 0, which is an index into anything."""
    if value.size_bytes > MOST_BYTES:
        raise BatchTooLargeError(
            f"values of a tensor of {value.size_bytes / 2**20:,.0f} MiB are read, more than the "
            f"{MOST_BYTES // 2**20:,} MiB that are drawn at random on the CPU"
        )
    value.is_random = True
    count = value.size_bytes // value.dtype.itemsize
    if value.dtype.is_floating_point:
        return torch.randn(count).to(value.dtype).untyped_storage()
    return torch.zeros(count, dtype=value.dtype).untyped_storage()


def _finite(func: Any, values: Tensor) -> Tensor:
    """Replace NaN in random numbers, and infinities where they are out of an operator's domain.

    Training goes well in the run that is planned: checks for them find none.
    """
    if not values.dtype.is_floating_point:
        return values
    if any(name in func._schema.name for name in _UNBOUNDED):
        return values.nan_to_num()
    return values.nan_to_num(posinf=float("inf"), neginf=float("-inf"))


def _laid_out(real: Tensor, layout: TensorView, size_bytes: int) -> torch.UntypedStorage:
    """Return a storage that has these values where the tensor on meta has them."""
    storage = real.untyped_storage()
    as_on_meta = real.stride() == layout.stride and real.storage_offset() == layout.offset
    if not as_on_meta or storage.nbytes() != size_bytes:
        storage = torch.UntypedStorage(size_bytes)  # type: ignore[no-untyped-call]
        layout.on(storage).copy_(real)
    return storage


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors among the arguments that the operator writes to."""
    written: list[Any] = []
    for position, name in _written_places(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        tensors = value if isinstance(value, list | tuple) else (value,)
        written.extend(one for one in tensors if isinstance(one, Tensor | TensorView))
    return written


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operator writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
