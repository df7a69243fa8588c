"""Make torchvision importable beside a torch that its compiled extension was not built for.

torchvision's wheels are built for CUDA. Beside a CPU-only torch its extension does not load, and
torchvision goes on without it, but registers fake kernels for two operators that only the extension defines
(torchvision/_meta_registrations.py). So their schemas must be there before torchvision is imported, and only
then: where the extension does load, a second definition of the same schemas would abort the process. The
other operators of `ops` are defined with them.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

from planner.capture.models.torchvision.ops import define_missing


def prepare_torchvision() -> None:
    """Make sure that a later `import torchvision` succeeds, without importing it; may be called twice."""
    spec = None if "torchvision" in sys.modules else importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _loads_extension(Path(spec.origin).parent):
        return
    define_missing()


def _loads_extension(package: Path) -> bool:
    """Load the extension as torchvision/extension.py will; a library loaded twice stays the same.

    Its name is `_C` up to torchvision 0.28 and `_C_stable` from 0.29 on. Beside a CUDA torch it is not
    tried: in a broken installation, a second definition would abort the process.
    """
    if torch.version.cuda is not None:
        return True
    for extension in package.glob("_C*"):
        if extension.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            try:
                torch.ops.load_library(str(extension))  # type: ignore[no-untyped-call]
            except (ImportError, OSError):
                continue
            return True
    return False
