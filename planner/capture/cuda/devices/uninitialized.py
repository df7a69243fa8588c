"""Let user code move the parameters of lazy modules, which have no shape before the first batch."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import parameter

from planner.capture.cuda.devices.placement import is_put_on_gpu, opened
from planner.capture.cuda.names import Replacement

_Uninitialized: Any = vars(parameter)["UninitializedTensorMixin"]


class _Methods:
    """The names of the methods that torch allows on a parameter without shape, and that tell its layout.

    torch compares the methods themselves, some of which are replaced.
    """

    _names = frozenset(one.__name__ for one in _Uninitialized._allowed_methods) | {
        *("untyped_storage", "numel", "element_size", "stride", "storage_offset"),
    }

    def __contains__(self, method: Any) -> bool:
        return getattr(method, "__name__", None) in self._names


def replacements() -> Iterator[Replacement]:
    """Yield replacements for the methods of a parameter without shape that know its device."""
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
