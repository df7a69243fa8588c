"""List and map the leaves of operators' arguments and results, nested in tuples, lists and dictionaries.

torch's pytrees support any container, but looking up each container would take a quarter of a capture.
"""

from collections.abc import Callable
from typing import Any

_CONTAINERS = (tuple, list, dict)


def leaves_of(*values: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dictionaries in order; None counts as a leaf."""
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
    """Return nested containers with `change` applied to each leaf; named tuples become plain tuples."""
    if not isinstance(value, _CONTAINERS):
        return change(value)
    if isinstance(value, dict):
        return {key: map_leaves(change, one) for key, one in value.items()}
    changed = [map_leaves(change, one) for one in value]
    return tuple(changed) if isinstance(value, tuple) else changed
