"""Lazy facades of packages (PEP 562): each name that a package shows is imported when it is first used.

As lazy_loader does it (SPEC 1), but without parsing stubs as Python, which would take 6 ms of each plan.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"^ *from \.([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_NAME = re.compile(r"(\w+) as \1\b")

Exports = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


class _Facade(ModuleType):
    """Package in which no module stands in place of the function that is called like it."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, as an import does for a module that it has read."""
        if not (isinstance(value, ModuleType) and name in self.__dict__.get("__all__", ())):
            super().__setattr__(name, value)


def attach_stub(package: str, file: str) -> Exports:
    """Return `__getattr__`, `__dir__` and `__all__` of a package by the stub beside its `__init__.py`.

    The stub has lines of the form `from .module import name as name`; without one, those lines stand in
    `__init__.py` itself, for type checkers alone.
    """
    stub = Path(file).with_suffix(".pyi")
    text = (stub if stub.exists() else Path(file)).read_text(encoding="utf-8")
    homes = {name: module for module, names in _IMPORT.findall(text) for name in _NAME.findall(names)}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        sys.modules[package].__dict__[name] = value
        return value

    sys.modules[package].__class__ = _Facade
    return get, lambda: sorted(homes), sorted(homes)
