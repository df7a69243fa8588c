"""Where a user's own calibrations and kept traces lie; the one place that reads the environment for it."""

import os
import sys
from pathlib import Path

from planner.errors import UsageError


def own_folder() -> Path | None:
    """Where `planner calibrate` writes by default and look-ups read: in the user's data folder.

    That is $XDG_DATA_HOME (https://specifications.freedesktop.org/basedir-spec), which has to be absolute, or
    ~/.local/share, and on Windows %LOCALAPPDATA%. None where no home is known.
    """
    named = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_DATA_HOME", "")
    try:
        base = Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:  # neither $HOME nor an entry for the user
        return None
    return base / "gpu-batch-planner" / "calibrations"


def cache_folder() -> Path | None:
    """Where traces are kept: in the user's cache folder.

    That is $XDG_CACHE_HOME (https://specifications.freedesktop.org/basedir-spec), which has to be absolute,
    or ~/.cache, and on Windows %LOCALAPPDATA%. None where no home is known.
    """
    windows = sys.platform == "win32"
    named = os.environ.get("LOCALAPPDATA" if windows else "XDG_CACHE_HOME", "")
    try:
        base = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # neither $HOME nor an entry for the user
        return None
    return base / "gpu-batch-planner" / "traces"


def folders_to_read(given: list[str] | None) -> list[Path]:
    """The folders of --calibrations, then the user's own if it is there."""
    own = folder_to_read()
    found = [*map(Path, given or ()), *([] if own is None else [own])]
    return list(dict.fromkeys(found))


def folder_to_read() -> Path | None:
    """The user's own folder if it is there."""
    own = own_folder()
    return own if own is not None and _is_there(own) else None


def folder_to_write(given: str | None) -> Path:
    """The folder of --out, or the user's own. Raises UsageError where there is neither."""
    folder = own_folder() if given is None else Path(given)
    if folder is None:
        raise UsageError("no home folder is known to keep calibrations in: give --out DIR")
    return folder


def _is_there(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:  # a home that this user may not enter
        return False
