"""Keep a planned script from replacing, renaming or deleting files that existed before the capture.

A planned script has no values to save, and it may save to the path of a real checkpoint, directly or by
another file that it renames or copies, and delete old checkpoints. The files that existed before are the
user's. What would replace the content of one is written to a temporary folder, and read from there.
Checkpoints and other binary files that did not exist before are deleted when the capture ends, since a later
training run must not load them. Text that the script appends, or writes to new files, is written as in
training.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

_OPENED: tuple[int, ...] = ()  # in place of the identity of a file that the script has opened itself


class SavedFiles:
    """A record of a capture's checkpoints, with file operations that leave the user's files unchanged."""

    def __init__(self) -> None:
        self._start_ns = time.time_ns()
        with suppress(OSError), TemporaryFile() as file:  # the clock of files is behind Python's
            self._start_ns = os.fstat(file.fileno()).st_ctime_ns
        self._made: dict[str, tuple[int, ...]] = {}  # by path: the identity of a checkpoint when written
        self._copies: dict[str, str] = {}  # by the path of a file of the user: the file read in its place
        self._folder: TemporaryDirectory[str] | None = None
        self._count = 0  # of the files in the folder

    @contextmanager
    def writing(self, target: Any) -> Iterator[Any]:
        """Yield `target`, or a temporary path if `target` exists and this capture has not written it."""
        if not isinstance(target, str | os.PathLike):
            yield target
            path = _real(getattr(target, "name", ""))
            if path:  # it may have held something before, so that it is not deleted
                self._made.setdefault(path, _OPENED)
            return
        path = _real(target)
        if self._is_foreign(path):
            yield self._in_place_of(path)
            return
        self._copies.pop(path, None)
        try:
            yield target
        finally:
            self._note(path)

    def to_open(self, file: Any, mode: str) -> Any:
        """Return `file`, or the temporary path in its place, made if `mode` would empty a user's file.

        A temporary file is also opened instead of emptying a binary file that another process writes
        meanwhile, and is read from then on. A file descriptor is returned unchanged.
        """
        path = _real(file) if "w" in mode else ""
        if path and Path(path).is_file():
            is_written = "b" in mode and self._is_foreign(path) and Path(path).stat().st_size
            if is_written or self._is_of_user(path):
                return self._copies.get(path) or self._in_place_of(path)
        return self.to_read(file)

    def note_opened(self, file: Any, mode: str) -> None:
        """Record a file as made by this capture if `mode` is for writing a new binary file ("wb" or "xb")."""
        if "b" in mode and ("w" in mode or "x" in mode):
            path = _real(file)
            if path not in self._copies and Path(path).is_file():
                self._made[path] = _identity(path)[:2]  # its size is not known yet

    def to_read(self, source: Any) -> Any:
        """Return the path of the file that was written in place of `source`, or `source` if there is none."""
        if not self._copies or not isinstance(source, str | os.PathLike):
            return source
        return self._copies.get(_real(source), source)

    def rename(self, plain: Callable[..., Any], source: Any, target: Any) -> None:
        """Rename a file or a folder; if a user's file would change, only redirect reads of `target`.

        `plain` is the original function. A folder that holds the user's files is not renamed.
        """
        old, new = _unresolved(source), _unresolved(target)
        if Path(old).is_dir() and not Path(old).is_symlink():
            if not self._holds_files_of_user(old):
                plain(source, target)
                self._follow(old, new)
        elif old in self._copies:
            self._put(self._copies.pop(old), new)
            if not self._is_of_user(old):
                Path(old).unlink(missing_ok=True)
        elif self._is_of_user(old):
            self._put(old, new)
        elif self._is_of_user(new) or (old in self._made and self._is_foreign(new)):
            shutil.move(old, self._in_place_of(new))
            self._made.pop(old, None)
        else:
            plain(source, target)
            self._copies.pop(new, None)
            identity = self._made.pop(old, None)
            if identity is not None:
                self._made[new] = identity

    def copy(self, plain: Callable[..., Any], source: Any, target: Any) -> Any:
        """Copy or link a file; if `target` is a user's file, only redirect reads of `target` to the copy.

        `plain` is the original function. A copy of a checkpoint of this capture keeps the holes.
        """
        old, new = _real(source), _real(target)
        if old in self._copies or old in self._made or self._is_of_user(new):
            self._put(self._copies.get(old, old), new)
            return target
        self._copies.pop(new, None)
        return plain(source, target)

    def remove(self, plain: Callable[..., None], path: Any) -> None:
        """Delete a file, unless it is the user's.

        `plain` is the original function. A file written in place of the user's file is forgotten.
        """
        real = _unresolved(path)
        self._copies.pop(real, None)
        if not self._is_of_user(real):
            plain(path)
            self._made.pop(real, None)

    def remove_folder(self, plain: Callable[..., None], path: Any) -> None:
        """Delete a folder, unless it holds the user's files. `plain` is the original function."""
        if not self._holds_files_of_user(_unresolved(path)):
            plain(path)

    def change(self, plain: Callable[..., None], source: Any, target: Any) -> None:
        """Copy a file's permissions or times, unless the target is the user's file.

        `plain` is the original function.
        """
        real = _real(target)
        if real not in self._copies and not self._is_of_user(real):
            plain(self.to_read(source), target)

    def close(self) -> None:
        """Delete the temporary files, and the checkpoints that have not changed since they were written."""
        for path, identity in self._made.items():
            with suppress(OSError):  # the script may have deleted it
                if identity and _identity(path)[: len(identity)] == identity:
                    Path(path).unlink()
        self._made.clear()
        self._copies.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _is_of_user(self, path: str) -> bool:
        """Return whether a file existed before the capture and has not changed since."""
        try:
            return os.lstat(path).st_ctime_ns < self._start_ns
        except OSError:
            return False

    def _is_foreign(self, path: str) -> bool:
        """Return whether a file exists and is not an unchanged checkpoint of this capture."""
        made = self._made.get(path)
        try:
            found = _identity(path)
            return not made or found[: len(made)] != made
        except OSError:
            return os.path.lexists(path)

    def _holds_files_of_user(self, folder: str) -> bool:
        return any(
            self._is_of_user(f"{place}/{name}") for place, _, names in os.walk(folder) for name in names
        )

    def _in_place_of(self, path: str) -> str:
        """Return the path of a new temporary file to use in place of the file at `path`.

        Reads of `path` get the temporary file from then on.
        """
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="planner-")
        self._count += 1
        self._copies[path] = f"{self._folder.name}/{self._count}"
        return self._copies[path]

    def _put(self, source: str, path: str) -> None:
        """Make reads of `path` return the content of `source`.

        The file at `path` becomes a copy of `source`, or a link if `source` is the user's file. A file that
        is not a checkpoint of this capture is not replaced; only reads of its path get the content.
        """
        is_of_user = self._is_of_user(source)
        is_kept = is_of_user or (self._folder is not None and source.startswith(self._folder.name))
        if self._is_foreign(path):
            if is_kept:
                self._copies[path] = source
            else:
                _copy(source, self._in_place_of(path))
            return
        self._copies.pop(path, None)
        Path(path).unlink(missing_ok=True)  # it may be a link to a file of the user
        if is_of_user:
            Path(path).symlink_to(source)
        else:
            _copy(source, path)
        self._note(path)

    def _note(self, path: str) -> None:
        """Record that this capture has written a checkpoint to `path`, if the file exists."""
        with suppress(OSError):
            self._made[path] = _identity(path)

    def _follow(self, old: str, new: str) -> None:
        """Update the recorded paths of checkpoints after their folder was renamed."""
        for path in [one for one in self._made if one.startswith(f"{old}{os.sep}")]:
            self._made[new + path[len(old) :]] = self._made.pop(path)


def _copy(source: str, target: str) -> None:
    """Copy a file, and keep its holes, which take no space on disk. Zeros of safetensors are holes."""
    with Path(source).open("rb") as read, Path(target).open("wb") as write:
        size = os.fstat(read.fileno()).st_size
        at = 0
        while at < size:
            try:
                at = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError:  # no data is left
                break
            hole = os.lseek(read.fileno(), at, os.SEEK_HOLE)
            read.seek(at)
            write.seek(at)
            write.write(read.read(hole - at))
            at = hole
        write.truncate(size)


def _real(path: Any) -> str:
    return os.path.realpath(path) if path and isinstance(path, str | os.PathLike) else ""


def _unresolved(path: str | os.PathLike[str]) -> str:
    """Return an absolute path with a folder free of links; the last name is kept, even if it is a link."""
    return os.path.realpath(Path(path).parent) + os.sep + Path(path).name


def _identity(path: str) -> tuple[int, ...]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino, found.st_size
