"""The capabilities: each module here that has a `CAPABILITY`."""

import importlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.emulated.capabilities.case import Capability

HERE = Path(__file__).parent
_OTHERS = ("__main__", "case", "page", "registry", "run", "steps_page")


def capability_names() -> Iterator[str]:
    """Yield the names of all capabilities, in alphabetical order."""
    yield from sorted(path.stem for path in HERE.glob("*.py") if path.stem not in _OTHERS)


def load_capability(name: str) -> Capability:
    """Return a capability by its name."""
    capability = importlib.import_module(f"benchmarks.emulated.capabilities.{name}").CAPABILITY
    assert isinstance(capability, Capability)
    return capability
