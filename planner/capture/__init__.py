"""Capture training loops as traces.

The loops run with torch on meta tensors.
"""

import functools
import sys
from typing import Any

from planner._support.lazy_exports import attach_stub
from planner._support.versions import installed_version
from planner.errors import ModelError
from planner.program import format_torch_version, torch_version_of

_OLDEST_INSTALLED = (2, 10)  # as in pyproject.toml
_WITHOUT_TORCH = "TracerProcess"  # the one name whose modules do not import torch

_export, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import and return a public name. Raises ModelError if its modules need a newer torch."""
    if name != _WITHOUT_TORCH:
        _check_torch()
    return _export(name)


@functools.cache
def _check_torch() -> None:
    """Raise ModelError if the installed torch is older than `_OLDEST_INSTALLED`."""
    imported = sys.modules.get("torch")
    version = getattr(imported, "__version__", None) or installed_version("torch") or ""
    if torch_version_of(version) < _OLDEST_INSTALLED:
        raise ModelError(
            f"torch {version} is installed for {sys.executable}: plans need torch >= "
            f"{format_torch_version(_OLDEST_INSTALLED)}; run planner with a Python that has it, --torch "
            "names the version that the job runs with"
        )
