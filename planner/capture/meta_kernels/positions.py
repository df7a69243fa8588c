"""Refuse lookups of positions beyond the rows of an embedding table.

On a GPU, the kernel of such a lookup fails an assertion. Unlike token ids, positions do not depend on data:
`arange` makes them. Views of the result of `arange` are checked; tensors computed from the result are not.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from planner.capture.meta_kernels.calls import call_operator
from planner.capture.operator_table import overload


class PositionError(IndexError):
    """Error for a position beyond the rows of a lookup table."""


# By storage: a weak reference that removes the entry when the storage dies, the first position, the step.
_RANGES: dict[int, tuple[weakref.ref[Any], int, int]] = {}


def _arange(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call `arange`, and remember its first value and step.

    Only ascending integers on the meta device are remembered.
    """
    out: Tensor = call_operator(func, args, kwargs)
    first, _, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if out.is_meta and not out.is_floating_point() and type(first) is int and type(step) is int and step > 0:
        storage = out.untyped_storage()
        key = storage._cdata
        _RANGES[key] = weakref.ref(storage, lambda _: _RANGES.pop(key, None)), first, step
    return out


def check_positions(args: tuple[Any, ...]) -> None:
    """Raise PositionError if `embedding(table, positions)` looks up a missing row.

    Only views of results of `arange` on the meta device are checked.
    """
    table, positions = args[0], args[1]
    if not positions.is_meta or not positions.numel():
        return
    known = _RANGES.get(positions.untyped_storage()._cdata)
    if known is None:
        return
    _, first, step = known
    lengths = zip(positions.shape, positions.stride(), strict=True)
    place = positions.storage_offset() + sum((size - 1) * stride for size, stride in lengths)
    last = first + step * int(place)
    if last >= table.shape[0]:
        raise PositionError(
            f"position {last:,} is looked up in a table of {table.shape[0]:,} rows, which a GPU refuses"
        )


KERNELS: Mapping[str, Callable[..., Any]] = {
    name: partial(_arange, overload(name)) for name in ("arange", "arange.start", "arange.start_step")
}
