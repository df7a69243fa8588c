"""Find and check the user's folders, and files to be written."""

from importlib.util import find_spec
from pathlib import Path

from planner._support.user_dirs import cache_dir, data_dir
from planner.errors import UsageError


def own_folder() -> Path | None:
    """Return the user's folder of calibrations, which need not exist, or None without a home folder."""
    folder = data_dir()
    return None if folder is None else folder / "calibrations"


def cache_folder() -> Path | None:
    """Return the folder of cached traces and cuDNN answers, or None without a home folder."""
    folder = cache_dir()
    return None if folder is None else folder / "traces"


def folders_to_read(given: list[str] | None) -> list[Path]:
    """Return the folders of --calibrations, then the user's folder if it exists."""
    return list(dict.fromkeys([*map(Path, given or ()), *filter(None, [folder_to_read()])]))


def folder_to_read() -> Path | None:
    """Return the user's folder of calibrations if it exists, else None."""
    own = own_folder()
    try:
        return own if own is not None and own.is_dir() else None
    except OSError:  # a home folder without permission
        return None


def folder_to_write(given: Path | None) -> Path:
    """Return the folder for new calibrations: `given`, the value of --out, or else the user's folder.

    Raises UsageError if neither folder is known.
    """
    folder = given or own_folder()
    if folder is None:
        raise UsageError("no home folder is known to keep calibrations in: give --out DIR")
    return folder


def plot_path(text: str | None) -> Path | None:
    """Return the path of --plot, or None if the option is not given.

    Raises UsageError for a wrong suffix, or if matplotlib is not installed.
    """
    return _checked_path("--plot", text, (".png", ".svg", ".pdf"), ".png, .svg or .pdf", "matplotlib", "plot")


def page_path(text: str | None) -> Path | None:
    """Return the path of --html, or None if the option is not given.

    Raises UsageError for a wrong suffix, or if plotly is not installed.
    """
    return _checked_path("--html", text, (".html", ".htm"), ".html", "plotly", "page")


def _checked_path(
    flag: str, text: str | None, suffixes: tuple[str, ...], endings: str, library: str, extra: str
) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.suffix not in suffixes:
        raise UsageError(f"{flag} {text}: give a file that ends in {endings}")
    if find_spec(library) is None:
        raise UsageError(f"{flag} needs {library}: pip install 'gpu-batch-planner[{extra}]'")
    return path
