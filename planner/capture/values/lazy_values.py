"""Compute the values of meta storages on the CPU when they are read.

Each storage has a `StorageValue`: a deferred operator with its arguments, or bytes once they are computed. An
in-place write makes a new value, so that earlier deferred operators still see the old value.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.capture.arguments import leaves_of, map_leaves
from planner.capture.values.nms import nms
from planner.errors import BatchTooLargeError

MOST_BYTES = 2**31  # largest storage whose values are drawn at random
# Parts of the names of operators whose results are random, since they multiply by weights.
RANDOMIZED_OPS = (
    *("convolution", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "addmv", "aten::mv"),
    *("scaled_dot_product", "_grouped_mm", "_cudnn_rnn", "roi_align"),
)
_UNBOUNDED = ("log", "div", "reciprocal", "exp", "sqrt", "pow")  # results may be infinite
_OWN_KERNELS: dict[str, Callable[..., Any]] = {"torchvision::nms": nms}  # not in all installations


@dataclass(slots=True, weakref_slot=True, eq=False)
class StorageValue:
    """The value of a storage: deferred, with the operator that makes it, or computed, with bytes."""

    size_bytes: int
    dtype: torch.dtype
    made_by: "DeferredOp | None" = None  # None if the value is computed, or unknown and so random
    storage: torch.UntypedStorage | None = None  # None until the bytes are computed
    is_random: bool = False  # whether the bytes are random, or computed from random bytes


@dataclass(frozen=True, slots=True)
class TensorView:
    """The layout of a tensor argument, and the value of its storage at the time of the call."""

    value: StorageValue
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def layout(self) -> "TensorView":
        """Return a view with the same layout but an empty value, so that the value is not kept alive."""
        return TensorView(StorageValue(0, self.dtype), self.dtype, self.size, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class DeferredOp:
    """An operator with its arguments, and references to the values that it will compute."""

    func: Any
    args: tuple[Any, ...]  # each meta tensor as a `TensorView`, here and in `kwargs`
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
    """Run an operator on the CPU, and return its result and copies of the storages to which it writes.

    The copies are keyed by the id of the value before the write.
    """
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
    """Run a deferred operator, and store the results in the values that are still alive.

    The values stay unknown if the operator is randomized, or if it fails on the CPU. So does the value of a
    result that has another shape on the CPU, such as a buffer that is empty on a GPU.
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
        if value is not None and results[index].shape == torch.Size(layout.size):
            result = _finite(op.func, results[index]) if is_random else results[index]
            value.storage, value.is_random = _laid_out(result, layout, value.size_bytes), is_random


def materialize(value: StorageValue) -> bool:
    """Compute a value and all that it depends on, and return whether a value was drawn at random."""
    is_any_random = False
    waiting = [value]  # a stack instead of recursion, since chains may be deep
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


class Pending(NamedTuple):
    """The sizes of the values that a read must compute, and whether a value is random."""

    largest_bytes: int
    total_bytes: int
    is_random: bool  # whether a value is random, or computed from random values


def inspect_pending(values: Sequence[StorageValue], most_bytes: float = float("inf")) -> Pending:
    """Return the largest and the total bytes to compute for a read of `values`, and whether any are random.

    Counting stops once a value is random and the largest size exceeds `most_bytes`.
    """
    waiting, seen = [*values], {id(value) for value in values}
    largest = total = 0
    is_random = False
    while waiting and not (is_random and largest > most_bytes):
        value = waiting.pop()
        if value.storage is not None:
            is_random |= value.is_random
            continue
        largest, total = max(largest, value.size_bytes), total + value.size_bytes
        op = value.made_by
        if op is None or op.is_randomized:
            is_random = True
            continue
        for needed in op.inputs:
            if id(needed) not in seen:
                seen.add(id(needed))
                waiting.append(needed)
    return Pending(largest, total, is_random)


def randomize(value: StorageValue) -> torch.UntypedStorage:
    """Return a storage of random numbers, or of zeros if the dtype is not floating-point.

    The numbers are normally distributed; the zeros are valid indices. Raises BatchTooLargeError for a value
    of more than `MOST_BYTES`.
    """
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
    """Replace NaN in `values` by 0, in place if `values` is contiguous.

    Infinities are replaced by finite numbers too if the operator makes infinities of finite values. In the
    planned run training works, so a model's checks for NaN and infinity find none. Values that are not
    floating-point are returned unchanged, and so are values of eight bits, which `nan_to_num` does not take.
    """
    if not values.dtype.is_floating_point or values.dtype.itemsize == 1:
        return values
    is_unbounded = any(name in func._schema.name for name in _UNBOUNDED)
    kept = {} if is_unbounded else {"posinf": float("inf"), "neginf": float("-inf")}
    return torch.nan_to_num(values, **kept, out=values if values.is_contiguous() else None)


def _laid_out(real: Tensor, layout: TensorView, size_bytes: int) -> torch.UntypedStorage:
    """Return a storage of `size_bytes` bytes with a real tensor's values in the layout `layout`."""
    storage = real.untyped_storage()
    as_on_meta = real.stride() == layout.stride and real.storage_offset() == layout.offset
    if not as_on_meta or storage.nbytes() != size_bytes:
        storage = torch.UntypedStorage(size_bytes)  # type: ignore[no-untyped-call]
        layout.on(storage).copy_(real)
    return storage


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors or `TensorView`s among the arguments to which an operator writes."""
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
