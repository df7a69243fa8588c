"""Walk the arguments and results of operators: leaves, and tuples, lists and dictionaries of them.

torch's pytrees know any container, and take a quarter of a capture to look each one up.
"""

from collections.abc import Callable
from typing import Any

_CONTAINERS = (tuple, list, dict)


def leaves_of(*values: Any) -> list[Any]:
    """Return the leaves of nested containers in order; None is one."""
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
    """Return containers like these with each leaf changed; named tuples become tuples."""
    if not isinstance(value, _CONTAINERS):
        return change(value)
    if isinstance(value, dict):
        return {key: map_leaves(change, one) for key, one in value.items()}
    changed = [map_leaves(change, one) for one in value]
    return tuple(changed) if isinstance(value, tuple) else changed
