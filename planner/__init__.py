"""How large a batch of this model, trained this way, fits this GPU, and how sure are we?

Public names are imported when they are first used: `import planner` alone imports neither torch nor typer.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# The public modules of the hooks, and where they live.
_ALIASES = {
    "planner.huggingface": "planner.api.integrations.huggingface",
    "planner.lightning": "planner.api.integrations.lightning",
}


class _AliasFinder(MetaPathFinder, Loader):
    """Find the public modules of the hooks in their room."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _ALIASES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(_ALIASES[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run under its own name."""


sys.meta_path.append(_AliasFinder())
