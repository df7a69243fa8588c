"""Write files atomically: the content is written under another name first, then renamed.

Every file that the planner writes goes through this module, as tests/robustness/test_written_files.py checks.
"""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from planner.errors import DataFileError

_BINARY = getattr(os, "O_BINARY", 0)
PARTIAL = ".partial"  # suffix of the temporary file's name while a file is written


def save(path: Path, content: bytes, what: str) -> None:
    """Write a file atomically, without creating missing parent folders.

    It is for files that an option names. Raises DataFileError if the file cannot be written; `what` names the
    content in the error message.
    """

    def write(partial: Path) -> None:
        if partial != path:
            _opened(partial, path).close()
        partial.write_bytes(content)

    try:
        _replace(path, write)
    except OSError as error:
        raise DataFileError(f"{path}: cannot write {what}: {error.strerror or error}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically and flush it to disk; create missing parent folders. Raises DataFileError."""

    def write(partial: Path) -> None:
        with _opened(partial, path) as file:
            file.write(content)
            file.flush()
            if partial != path:  # a device or a pipe stores nothing
                os.fsync(file.fileno())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, write)
    except OSError as error:
        raise DataFileError(
            f"{path}: cannot be written: {error.strerror or error}; check the folder"
        ) from error


def _opened(partial: Path, path: Path) -> BinaryIO:
    """Open `partial` as a new file for writing, or `path` itself if the two are equal.

    They are equal if `path` is a device or a pipe. A file or a link that is already at `partial` is removed
    first, and no link is followed.
    """
    if partial == path:  # a device or a pipe
        return path.open("wb")
    with suppress(FileNotFoundError):
        partial.unlink()
    return os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666), "wb")


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then rename the temporary file to `path`.

    If `path` is a link, its target is replaced and the link stays. A device or a pipe is written directly.
    The temporary file is removed if anything fails, and if an interrupt comes at any moment, even while the
    file is being removed; so this is no context manager, between whose parts an interrupt may come.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        write(path)
        return
    try:
        target = path.resolve() if path.is_symlink() else path
    except RuntimeError as error:  # links that lead to each other
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
    partial = target.parent / f"{target.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}"
    try:
        try:
            write(partial)
            partial.replace(target)
        except BaseException:
            _remove(partial)
            raise
    except BaseException:
        _remove(partial)
        raise


def _remove(partial: Path) -> None:
    with suppress(OSError):  # the file could not be created
        partial.unlink()
