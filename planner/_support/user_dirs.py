"""Return the user's folders for data and caches, by the XDG base directory specification.

https://specifications.freedesktop.org/basedir-spec; on Windows both are in %LOCALAPPDATA%.
"""

import os
import sys
from pathlib import Path

_NAME = "gpu-batch-planner"


def data_dir() -> Path | None:
    """Return the planner's folder in $XDG_DATA_HOME or ~/.local/share, or None if no home is known."""
    return _folder("XDG_DATA_HOME", ".local/share")


def cache_dir() -> Path | None:
    """Return the planner's folder in $XDG_CACHE_HOME or ~/.cache, or None if no home is known."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, below_home: str) -> Path | None:
    """Return the planner's folder inside an environment variable's folder, or else inside the home folder.

    The variable counts only if its path is absolute. Windows uses LOCALAPPDATA in its place.
    """
    named = Path(os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else variable, ""))
    try:
        base = named if named.is_absolute() else Path.home() / below_home
    except RuntimeError:  # neither $HOME nor an entry for the user
        return None
    return base / _NAME
