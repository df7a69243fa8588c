"""Load the stand-in libraries before torch is imported.

torch and transformers are patched after their import.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import batch_norms, generation, packed_texts
from .libraries.build import CORE, build, load_order
from .libraries.installation import find_installation
from .libraries.tools import EmulatorError

_FIRST = ("torch", "triton", "pynvml")  # whichever of them is imported first needs the libraries
USAGE_ERROR = 2


def install() -> None:
    """Install an import finder that loads the stand-in libraries before torch, triton or pynvml."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """An import finder that loads the stand-ins before torch, and patches modules after their import."""

    def __init__(self) -> None:
        self._loaded = False
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Load the stand-ins before the first import of a module in `_FIRST`; return its spec, or None.

        A spec is also returned for a module in `_ATTACHED`. Its loader patches the module after running it.
        The result is None for other modules, and if torch is not installed.
        """
        attach = _ATTACHED.get(name)
        if self._busy or (name not in _FIRST and attach is None):
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
            if not self._loaded and name in _FIRST:
                torch = spec if name == "torch" else importlib.util.find_spec("torch")
                if torch is None or torch.origin is None:
                    return None  # another environment's Python, which has no torch
                self._loaded = True
                _load_or_exit(Path(torch.origin).parent)
        finally:
            self._busy = False
        if attach is not None and spec is not None and spec.loader is not None:
            spec.loader = _Attaching(spec.loader, attach)
        return spec


class _Attaching(importlib.abc.Loader):
    """A loader that runs a module with its original loader, then calls a function with the module."""

    def __init__(self, loader: Any, attach: Callable[[ModuleType], None]) -> None:
        self._loader, self._attach = loader, attach

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with its original loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with its original loader, then call the function with the module."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._attach(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _attach_recorder(torch: ModuleType) -> None:
    from . import objects, recorder, truths

    recorder.attach(torch, ctypes.CDLL(CORE))
    objects.attach(torch)
    truths.attach(torch)


_ATTACHED = {
    "torch": _attach_recorder,
    generation.MODULE: generation.attach,
    batch_norms.MODULE: batch_norms.attach,
    packed_texts.MODULE: packed_texts.attach,
}


def _load_or_exit(torch: Path) -> None:
    try:
        _load(torch)
    except (EmulatorError, OSError) as error:
        _refuse(" ".join(str(error).split()))
        os._exit(USAGE_ERROR)  # no exception: a script may take it for a missing package and go on without


def _refuse(reason: str) -> None:
    """Write why loading failed to the records folder of `planner run`, or print it without a folder."""
    folder = os.environ.get("PLANNER_EMULATED_RECORDS")
    if folder:
        (Path(folder) / "refusal").write_text(reason, encoding="utf-8")
    else:
        print(f"planner: {reason}", file=sys.stderr, flush=True)


def _load(torch: Path) -> None:
    installation = find_installation(torch)
    folder = build(installation, Path(os.environ["PLANNER_EMULATED_CACHE"]))
    os.environ["PLANNER_EMULATED_CUDNN"] = str(installation.cudnn)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    for name in load_order(installation):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    # cuDNN compiles kernels with NVRTC as it makes plans; NVRTC finds its builtins once they are loaded.
    for builtins in installation.cudnn.parents[2].glob("*/lib/libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
