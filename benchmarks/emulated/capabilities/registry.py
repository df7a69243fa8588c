"""The capabilities: each module here that has a `CAPABILITY`, and the tables that `own_loop.py` names."""

import importlib
from collections.abc import Iterator

from benchmarks.emulated.capabilities.case import HERE, Capability
from benchmarks.emulated.capabilities.own_loop import OWN_LOOP, own_loop_capability

__all__ = ["HERE", "capability_names", "load_capability"]
_OTHERS = ("__main__", "case", "own_loop", "page", "registry", "run", "steps_page")


def capability_names() -> Iterator[str]:
    """Yield the names of all capabilities, in alphabetical order."""
    modules = {path.stem for path in HERE.glob("*.py") if path.stem not in _OTHERS}
    yield from sorted(modules | OWN_LOOP.keys())


def load_capability(name: str) -> Capability:
    """Return a capability by its name."""
    if name in OWN_LOOP:
        return own_loop_capability(name)
    capability = importlib.import_module(f"benchmarks.emulated.capabilities.{name}").CAPABILITY
    assert isinstance(capability, Capability)
    return capability
