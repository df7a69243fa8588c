"""Import the modules that stand beside a user's file, as if the file were run.

A script finds `utils.py` of its own folder. Two files of two folders may each have one of that name, or one
may name an installed package so, and a process has one module a name: the modules of one folder are set aside
while those of another are imported.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

_imported: dict[Path, dict[str, ModuleType]] = {}  # by the files of each folder, from this folder


@contextmanager
def importing_beside(path: Path) -> Iterator[None]:
    """Make the modules beside a file importable, and take away those beside files of other folders."""
    folder = path.parent
    _exchange(folder)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may have changed the path itself
            sys.path.remove(str(folder))
        new = {name: sys.modules[name] for name in set(sys.modules) - before}
        beside = {name for name, module in new.items() if _folder_of(module) == folder}
        own = {name: module for name, module in new.items() if name.partition(".")[0] in beside}
        _imported.setdefault(folder, {}).update(own)


def _exchange(folder: Path) -> None:
    for other, modules in _imported.items():
        for name, module in modules.items():
            if other != folder and sys.modules.get(name) is module:
                del sys.modules[name]
    for name, module in _imported.get(folder, {}).items():
        sys.modules.setdefault(name, module)


def _folder_of(module: ModuleType) -> Path | None:
    """Return the folder in which a top-level module or package stands."""
    packages = list(getattr(module, "__path__", ()))
    place = packages[0] if packages else getattr(module, "__file__", None)
    return Path(place).parent if place else None
