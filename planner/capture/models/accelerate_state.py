"""Keep a capture's shared state of accelerate separate from the process's.

An `Accelerator` that a captured step makes has the planned GPU as its device.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CLASSES = ("PartialState", "AcceleratorState", "GradientState")  # accelerate/state.py


@contextmanager
def own_accelerate_state(is_cleared: bool) -> Iterator[None]:
    """Restore accelerate's shared state on exit, and clear it on entry if `is_cleared`."""
    before = [dict(shared) for shared in _shared_states()]
    if is_cleared:
        _restore([])
    try:
        yield
    finally:
        _restore(before)


def _shared_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    return [] if module is None else [getattr(module, name)._shared_state for name in _CLASSES]


def _restore(before: list[dict[str, Any]]) -> None:
    for number, shared in enumerate(_shared_states()):  # accelerate may have been imported meanwhile
        shared.clear()
        shared.update(before[number] if before else {})
