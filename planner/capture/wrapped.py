"""Handle wrapper tensors, which consist of other tensors.

DTensors, results of collectives and torchao's weights are wrappers. The class of a wrapper names the inner
tensors (`__tensor_flatten__`, torch/utils/_python_dispatch.py) and calls operators on them itself. Only the
inner tensors have memory.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = frozenset((Tensor, nn.Parameter))
_made: WeakSet[type] = WeakSet()


def is_wrapped(tensor: Any) -> bool:
    """Return whether a tensor is a wrapper that consists of other tensors."""
    return type(tensor) not in _PLAIN and bool(is_traceable_wrapper_subclass(tensor))


def add_wrapper_class(kind: type) -> None:
    """Count a class as one that wraps tensors, since `_make_wrapper_subclass` made a tensor of it."""
    _made.add(kind)


def calls_operators_itself(kind: type) -> bool:
    """Return whether a class wraps tensors and calls operators on them itself.

    Without `__tensor_flatten__` a class does if `_make_wrapper_subclass` made a tensor of it.
    """
    return hasattr(kind, "__tensor_flatten__") or kind in _made


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory inside a wrapper, or the tensor itself if it is plain.

    Wrappers may be nested.
    """
    if not is_wrapped(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for held in (getattr(tensor, name) for name in names):
        if isinstance(held, Tensor):  # a DTensor names its mesh too
            yield from parts(held)


def with_parts(tensor: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a wrapper with `change` applied to each inner tensor."""
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    changed = {name: _changed(one, change) for name, one in held.items()}
    return type(tensor).__tensor_unflatten__(changed, context, tensor.size(), tensor.stride())


def _changed(held: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if is_wrapped(held):
        return with_parts(held, change)
    return change(held) if isinstance(held, Tensor) else held
