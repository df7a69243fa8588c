"""Random numbers that a model's code draws outside of torch, from Python's or numpy's global generators."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watch_python_random() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Watch the global generators; yields a function that returns a note where numbers were drawn since.

    Steps and runs then take different sizes or another course, as those of VOLO do, whose images are mixed
    in boxes of random sizes (timm).
    """
    before = _states()

    def notes() -> tuple[str, ...]:
        drawn = [name for name, state in _states().items() if state != before.get(name, state)]
        if not drawn:
            return ()
        return (
            f"the model draws numbers from {' and '.join(drawn)}: where they decide sizes or what runs, "
            "steps and runs differ from the traced ones",
        )

    yield notes


def _states() -> dict[str, Any]:
    """Return the states of the generators by the names of their modules."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy.random"] = keys.tobytes(), position
    return states
