"""Tell the script's own code from torch's, installed packages' and Python's."""

from __future__ import annotations

import os
from pathlib import Path

_OTHERS = (
    "site-packages",
    "dist-packages",
    f"{os.sep}lib{os.sep}python",
    "planner/emulator/",
    "torchinductor",
)


def is_own(path: str) -> bool:
    """Return whether a file is the script's: not torch's, nor an installed package's, nor Python's."""
    return Path(path).is_file() and not any(part in path for part in _OTHERS)
