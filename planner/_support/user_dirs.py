"""Return the planner's folders for the user's data and caches, by the XDG base directory specification.

https://specifications.freedesktop.org/basedir-spec; on Windows both are in %LOCALAPPDATA%.
"""

import os
import sys
from pathlib import Path

_NAME = "gpu-batch-planner"


def data_dir() -> Path | None:
    """Return the planner's folder for the user's data, or None if no base folder is known.

    The base folder is $XDG_DATA_HOME or ~/.local/share; on Windows it is %LOCALAPPDATA%.
    """
    return _folder("XDG_DATA_HOME", ".local/share")


def cache_dir() -> Path | None:
    """Return the planner's folder for the user's caches, or None if no base folder is known.

    The base folder is $XDG_CACHE_HOME or ~/.cache; on Windows it is %LOCALAPPDATA%.
    """
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, below_home: str) -> Path | None:
    """Return the planner's folder in the folder of `variable`, or in `below_home`, or None without either.

    The environment variable counts only if its path is absolute. On Windows, LOCALAPPDATA is read instead of
    `variable`. `below_home` is relative to the home folder.
    """
    named = Path(os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else variable, ""))
    try:
        base = named if named.is_absolute() else Path.home() / below_home
    except RuntimeError:  # neither $HOME nor an entry for the user
        return None
    return base / _NAME
