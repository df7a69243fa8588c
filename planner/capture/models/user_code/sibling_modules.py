"""Import the modules in the folder of a user's file.

Python does so if the file is run as a script. A script can import a `utils.py` from its folder. Two folders
may each have a `utils.py`, or an installed package may have this name, but a process has only one module of a
name. So modules from one folder are removed from `sys.modules` while modules of another folder are imported.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

_imported: dict[Path, dict[str, ModuleType]] = {}  # folder -> the modules imported from it, by name


@contextmanager
def folder_importable(path: Path) -> Iterator[None]:
    """Make the modules in a file's folder importable inside the context.

    Modules imported from the folders of other files are removed from `sys.modules` on entry.
    """
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
        own_names = {name for name, module in new.items() if _folder_of(module) == folder}
        own = {name: module for name, module in new.items() if name.partition(".")[0] in own_names}
        _imported.setdefault(folder, {}).update(own)


def forget_modules(path: Path) -> None:
    """Make modules in a file's folder run again when they are next imported.

    Modules that were imported before the first plan are kept.
    """
    for name, module in _imported.pop(path.parent, {}).items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _exchange(folder: Path) -> None:
    for other, modules in _imported.items():
        for name, module in modules.items():
            if other != folder and sys.modules.get(name) is module:
                del sys.modules[name]
    for name, module in _imported.get(folder, {}).items():
        sys.modules.setdefault(name, module)


def _folder_of(module: ModuleType) -> Path | None:
    """Return the folder of a top-level module, or None for a module without a file.

    For a package, it is the folder that contains the package.
    """
    packages = list(getattr(module, "__path__", ()))
    place = packages[0] if packages else getattr(module, "__file__", None)
    return Path(place).parent if place else None
