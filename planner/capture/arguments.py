"""List and map the leaves of operators' arguments and results.

Leaves are nested in tuples, lists and dictionaries. torch's pytrees support any container, but looking up
each container would take a quarter of a capture. Arguments that are on the CPU while other arguments are on
the GPU are marked.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CONTAINERS = (tuple, list, dict)


def leaves_of(*values: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dictionaries, in order. None counts as a leaf."""
    found: list[Any] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Any]) -> None:
    for value in values:
        if isinstance(value, _CONTAINERS):
            _collect(value.values() if isinstance(value, dict) else value, found)
        else:
            found.append(value)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested containers with `change` applied to each leaf.

    Named tuples become plain tuples.
    """
    if not isinstance(value, _CONTAINERS):
        return change(value)
    if isinstance(value, dict):
        return {key: map_leaves(change, one) for key, one in value.items()}
    changed = [map_leaves(change, one) for one in value]
    return tuple(changed) if isinstance(value, tuple) else changed


class CpuTensor(Tensor):
    """A meta tensor that workspace rules treat as a CPU tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def as_cpu_tensor(tensor: Tensor) -> Tensor:
    """Return a view of a meta tensor as a `CpuTensor`, for which `is_on_cpu` is True."""
    return Tensor._make_subclass(CpuTensor, tensor)


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU or is a `CpuTensor`."""
    return isinstance(tensor, CpuTensor) or tensor.is_cpu
