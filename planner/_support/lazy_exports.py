"""Make a package import each of its public names when the name is first used (PEP 562).

The module follows lazy_loader (SPEC 1), but does not parse stubs as Python, which would take 6 ms of each
plan.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"^ *from \.([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_SUBMODULE = re.compile(r"^ *from \. import (\w+) as \1$", re.MULTILINE)
_NAME = re.compile(r"(\w+) as \1\b")

Exports = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


class _Facade(ModuleType):
    """A package whose public names are not overwritten by submodules of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, unless a module would replace a public name of the package.

        An import sets each module that it reads as an attribute of the package.
        """
        if not (isinstance(value, ModuleType) and name in self.__dict__.get("__all__", ())):
            super().__setattr__(name, value)


def attach_stub(package: str, file: str) -> Exports:
    """Return a package's `__getattr__`, `__dir__` and `__all__`, made from the stub next to `file`.

    The stub has lines of the form `from .module import name as name` or, for a submodule, which is not in
    `__all__`, `from . import module as module`. Without a stub, these lines are read from `__init__.py`
    itself, which has them for type checkers alone.
    """
    stub = Path(file).with_suffix(".pyi")
    text = (stub if stub.exists() else Path(file)).read_text(encoding="utf-8")
    homes = {name: module for module, names in _IMPORT.findall(text) for name in _NAME.findall(names)}
    public = sorted(homes)
    homes |= dict.fromkeys(_SUBMODULE.findall(text), "")

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        try:
            module = import_module(f"{package}.{home or name}")
        except AttributeError as error:  # `from package import name` would hide the message
            raise ImportError(f"{package}.{home or name}: AttributeError: {error}") from error
        value = getattr(module, name) if home else module
        sys.modules[package].__dict__[name] = value
        return value

    sys.modules[package].__class__ = _Facade
    return get, lambda: sorted(homes), public
