"""A cache folder with one file per entry: the programs of a job, or a completed job.

Files are written atomically, and the least recently used files are deleted first. A file that is broken or
does not match its name is reported and not used; a new file overwrites it. If nothing can be written, the
problem is reported once and is no error: the plan continues without the cache.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from planner._support.atomic_write import PARTIAL
from planner.errors import DataFileError, UsageError
from planner.program import Program
from planner.store.codec import ProgramFile, load_programs, save_programs
from planner.store.fingerprint import Fingerprint, digest
from planner.store.layout import About

LIMIT_BYTES = 512 * 2**20
SUFFIX = ".trace"
_ATTEMPTS = 3  # attempts to write a trace while other processes clear the folder
_ABANDONED_SECONDS = 3600

Warn = Callable[[str], None]  # called with one line about a harmless problem


class CacheStats(Struct, frozen=True):
    """The number of entries in a cache, and their total size."""

    entries: int
    size_bytes: int


@dataclass(slots=True)
class CacheDirectory:
    """A cache of programs and completed jobs in a folder."""

    folder: Path
    warn: Warn
    limit_bytes: int = LIMIT_BYTES
    _warned: set[str] = field(default_factory=set)

    def get(self, key: Fingerprint) -> ProgramFile | None:
        """Return the contents of the file stored under a key, or None if there is no valid file.

        The file is marked as used.
        """
        path = self._path(key)
        try:
            if not path.exists():
                return None
            file = load_programs(path)
        except OSError as error:  # a folder that this user may not enter
            self._warn_once("read", f"{self.folder}: no cached trace can be read: {error.strerror or error}")
            return None
        except DataFileError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # otherwise another process has deleted it
                self.warn_of(str(error))
            return None
        if file.about.get("key") != key:
            self.warn_of(f"{path}: holds the trace of another job")
            return None
        with suppress(OSError):  # a read-only folder
            os.utime(path, follow_symlinks=False)
        return file

    def put(self, key: Fingerprint, programs: Sequence[Program], about: About) -> None:
        """Store programs under a key, and trim the folder to its limit. Warns once if that fails."""
        try:
            self._save(key, programs, about)
            self._trim()
        except OSError as error:
            self._warn_once("write", f"{self.folder}: no trace can be cached: {error.strerror or error}")
        except DataFileError as error:
            self._warn_once("write", f"{error}; the plan goes on without caching it")

    def _save(self, key: Fingerprint, programs: Sequence[Program], about: About) -> None:
        for attempt in range(_ATTEMPTS):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                if self._path(key).is_symlink():  # not created by the planner, which makes no links
                    self._path(key).unlink()
                save_programs(programs, self._path(key), about | {"key": key})
                break
            except DataFileError as error:
                cleared = isinstance(error.__cause__, FileNotFoundError)  # by another process
                if not cleared or attempt == _ATTEMPTS - 1:
                    raise

    def warn_of(self, why: str) -> None:
        """Warn that a cached trace cannot be used, for the reason `why`, and is captured again.

        Only the first such problem of the cache is shown.
        """
        self._warn_once("read", why if "capture it again" in why else f"{why}; capturing it again")

    def stats(self) -> CacheStats:
        """Return the number and total size of the entries. Raises DataFileError if they cannot be listed."""
        sizes = [size for _, size, _ in self._entries()]
        return CacheStats(len(sizes), sum(sizes))

    def clear(self) -> CacheStats:
        """Delete all entries, and return their number and size.

        Unfinished files are deleted too, but not counted. Raises DataFileError.
        """
        stats = self.stats()
        for path in (*(path for _, _, path in self._entries()), *self._partials()):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DataFileError(f"{path}: cannot be deleted: {error.strerror or error}") from error
        return stats

    def _path(self, key: Fingerprint) -> Path:
        return self.folder / f"{digest(key)}{SUFFIX}"

    def _entries(self) -> list[tuple[float, int, Path]]:
        """Return (last use, bytes, path) for each entry, least recently used first."""
        entries = []
        try:
            for path in self.folder.iterdir() if self.folder.exists() else ():
                if path.suffix == SUFFIX:
                    with suppress(FileNotFoundError):  # another process has deleted it
                        status = path.lstat()
                        entries.append((status.st_mtime, status.st_size, path))
        except OSError as error:
            raise DataFileError(f"{self.folder}: cannot be read: {error.strerror or error}") from error
        return sorted(entries)

    def _partials(self) -> Iterator[Path]:
        return self.folder.glob(f"*{SUFFIX}.*{PARTIAL}") if self.folder.exists() else iter(())

    def _trim(self) -> None:
        """Delete the least recently used entries beyond the limit, and old unfinished files.

        The most recently used entry is kept at any size.
        """
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries[:-1]:  # the newest stays at any size
            if total <= self.limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        newest = entries[-1][0] if entries else 0.0
        for path in self._partials():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < newest - _ABANDONED_SECONDS:
                    path.unlink()

    def _warn_once(self, about: str, line: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self.warn(line)


def open_cache(folder: Path, warn: Warn) -> CacheDirectory:
    """Return the cache in a folder, which need not exist. Raises UsageError if the path is a file."""
    try:
        is_file = folder.is_file()
    except OSError:
        is_file = False
    if is_file:
        raise UsageError(f"{folder}: is a file, not a folder to keep traces in; name another")
    return CacheDirectory(folder, warn)
