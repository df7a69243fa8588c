"""Note whether a model's code draws random numbers from Python's or numpy's global generators."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watch_python_random() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Yield a function that returns a note if a global generator was used inside the context, or else ().

    Steps and runs may then differ in sizes or control flow: VOLO (timm) mixes images in boxes of random
    sizes.
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
    """Return the states of Python's and numpy's global generators, keyed by module name.

    numpy's generator is left out if numpy is not imported.
    """
    states: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy.random"] = keys.tobytes(), position
    return states
