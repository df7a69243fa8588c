"""Let user code move the parameters of lazy modules, which have no shape before the first batch."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import parameter

from planner.capture.cuda.devices.placement import is_put_on_gpu, opened
from planner.capture.cuda.names import Replacement

_Uninitialized: Any = vars(parameter)["UninitializedTensorMixin"]


class _Methods:
    """A container of the methods, by name, that may be called on a parameter without shape.

    torch compares the methods themselves, some of which are replaced.
    """

    _names = frozenset(one.__name__ for one in _Uninitialized._allowed_methods) | {
        *("untyped_storage", "numel", "element_size", "stride", "storage_offset"),
    }

    def __contains__(self, method: Any) -> bool:
        return getattr(method, "__name__", None) in self._names


def replacements() -> Iterator[Replacement]:
    """Yield replacements for a lazy parameter's `materialize` and its set of allowed methods."""
    yield _Uninitialized, "_allowed_methods", _Methods()
    yield _Uninitialized, "materialize", _materializing(_Uninitialized.materialize)


def _materializing(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a version of `materialize` that logs the new tensor of a parameter on the GPU."""

    @functools.wraps(plain)
    def materialize(self: Any, *args: Any, **kwargs: Any) -> None:
        is_on_gpu = is_put_on_gpu(self)
        plain(self, *args, **kwargs)
        if is_on_gpu:
            opened[-1].put(self)

    return materialize
