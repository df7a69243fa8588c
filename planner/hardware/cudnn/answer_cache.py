"""Cache the answers of a cuDNN in a file for later plans.

The file is a SQLite database, which several processes may read and write at once. Answers are written in
transactions, with a rollback journal, since a write-ahead log does not work on network file systems. After a
failed read cuDNN is queried, and after a failed write it is queried again later; neither is an error. A file
that is no such database is deleted and replaced. Each answer is stored with a checksum of the answer and its
key, since SQLite stores no checksums.
"""

import os
import sqlite3
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, TypeVar
from zlib import crc32

from msgspec import DecodeError, msgpack

from planner.errors import DataFileError
from planner.program import Engine

T = TypeVar("T")
NAME = "convolutions.sqlite"
LIMIT_BYTES = 128 * 2**20  # at 80 to 100 bytes per answer
_FLUSH_SECONDS = 1.0  # an interrupted process loses the answers of this time
_WAIT_SECONDS = 2.0  # for another process that writes
_CHECKSUM_BYTES = 4
_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL)"
_ABOVE_LIMIT = """
    SELECT (page_count - freelist_count) * page_size > ?
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size
"""
_DELETE_OLDER_HALF = """
    DELETE FROM answers
    WHERE rowid < (SELECT rowid FROM answers ORDER BY rowid LIMIT 1 OFFSET (SELECT count(*) / 2 FROM answers))
"""


@dataclass(eq=False)
class AnswerCache:
    """A cache of cuDNN's answers by key, in a SQLite file in `folder`."""

    folder: Path
    limit_bytes: int = LIMIT_BYTES
    _pending: dict[bytes, bytes] = field(default_factory=dict)  # not written yet
    _reader: sqlite3.Connection | None = None
    _is_opened: bool = False
    _flushed: float = field(default_factory=monotonic)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        weakref.finalize(self, _flush_at_end, self._path, self._pending, self.limit_bytes, os.getpid())

    @property
    def _path(self) -> Path:
        return self.folder / NAME

    def get(self, key: bytes) -> bytes | None:
        """Return the cached answer for a key, or None if it is missing or unreadable.

        Damaged answers count as missing.
        """
        with self._lock:
            pending = self._pending.get(key)
            if pending is not None:
                return pending
            reader = self._open_reader()
            if reader is None:
                return None
            try:
                row = reader.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            except sqlite3.Error:
                return None
        return None if row is None else _checked(key, row[0])

    def put(self, key: bytes, answer: bytes) -> None:
        """Add an answer to the cache, and write it to the file at the latest when the process ends."""
        with self._lock:
            self._pending[key] = answer
            if monotonic() - self._flushed > _FLUSH_SECONDS:
                self._flush()

    def flush(self) -> None:
        """Write all pending answers to the file. Answers that cannot be written are dropped."""
        with self._lock:
            self._flush()

    def stats(self) -> tuple[int, int]:
        """Return the file's number of answers (0 if missing or damaged) and its size in bytes."""
        try:
            size_bytes = self._path.stat().st_size
        except OSError:
            return 0, 0
        try:
            with closing(_connect_to_read(self._path)) as connection:
                (answers,) = connection.execute("SELECT count(*) FROM answers").fetchone()
        except (OSError, sqlite3.Error):  # the file is damaged
            return 0, size_bytes
        return answers, size_bytes

    def clear(self) -> tuple[int, int]:
        """Delete the file, and return the number of answers and the size in bytes that it had.

        Raises DataFileError if the file cannot be deleted.
        """
        stats = self.stats()
        try:
            if self._path.exists():
                with suppress(OSError, sqlite3.Error), _writing(self._path):  # while no other process writes
                    _delete(self._path)
                _delete(self._path)
        except OSError as error:
            raise DataFileError(f"{self._path}: cannot be deleted: {error.strerror or error}") from error
        return stats

    def _open_reader(self) -> sqlite3.Connection | None:
        if not self._is_opened:
            self._is_opened = True
            with suppress(OSError, sqlite3.Error):
                self._reader = _connect_to_read(self._path)
        return self._reader

    def _flush(self) -> None:
        self._flushed = monotonic()
        _write(self._path, self._pending, self.limit_bytes)
        self._pending.clear()  # answers that could not be written are queried again later


@dataclass(eq=False, slots=True)
class LibraryAnswers:
    """The cached answers and the cached version of one cuDNN library."""

    cache: AnswerCache
    library: bytes  # digest of everything that decides its answers apart from GPU and convolution

    def version(self) -> int | None:
        """Return the library's cached version, or None if it is not cached."""
        return self._get(self._key("version"), int)

    def put_version(self, version: int) -> None:
        """Store the library's version."""
        self.cache.put(self._key("version"), msgpack.encode(version))

    def get(self, query: tuple[Any, ...]) -> tuple[Engine, ...] | None:
        """Return the cached engines for a query, or None if they are not cached."""
        return self._get(self._key(query), tuple[Engine, ...])

    def put(self, query: tuple[Any, ...], engines: tuple[Engine, ...]) -> None:
        """Store the engines for a query."""
        self.cache.put(self._key(query), msgpack.encode(engines))

    def _key(self, query: object) -> bytes:
        return blake2b(msgpack.encode(query), key=self.library, digest_size=16).digest()

    def _get(self, key: bytes, kind: type[T]) -> T | None:
        answer = self.cache.get(key)
        try:
            return None if answer is None else msgpack.decode(answer, type=kind)
        except DecodeError:
            return None


def _checked(key: bytes, stored: object) -> bytes | None:
    """Return a stored answer without its checksum, or None if the checksum is wrong."""
    if not isinstance(stored, bytes):
        return None
    answer = stored[_CHECKSUM_BYTES:]
    return answer if stored == _with_checksum(key, answer) else None


def _with_checksum(key: bytes, answer: bytes) -> bytes:
    return crc32(answer, crc32(key)).to_bytes(_CHECKSUM_BYTES, "big") + answer


def _connect_to_read(path: Path) -> sqlite3.Connection:
    # A lock keeps threads apart. By default SQLite would create the file; in mode "ro" it could not roll back
    # a transaction that a killed process left unfinished.
    if path.is_symlink() or not path.is_file():
        raise OSError(f"{path} is no regular file")
    where = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(where, uri=True, timeout=_WAIT_SECONDS, check_same_thread=False)


@contextmanager
def _writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database, and hold an exclusive transaction until the context ends.

    The transaction is committed at the end, and is rolled back if the context raises.
    """
    with closing(sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute(_SCHEMA)
        yield connection
        connection.execute("COMMIT")


def _write(path: Path, answers: dict[bytes, bytes], limit_bytes: int) -> None:
    """Add answers to the cache file, and delete the older half of the answers if it exceeds the limit.

    A damaged file is replaced, and a failed write is ignored.
    """
    if not answers:
        return
    rows = [(key, _with_checksum(key, answer)) for key, answer in answers.items()]

    def add() -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in (path, _journal_of(path)):
            if one.is_symlink() or (one.exists() and not one.is_file()):
                one.unlink()  # it is foreign: SQLite would write to a link's target, or wait for a pipe
        with _writing(path) as connection:
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
            if connection.execute(_ABOVE_LIMIT, (limit_bytes,)).fetchone()[0]:
                connection.execute(_DELETE_OLDER_HALF)

    with suppress(OSError, sqlite3.Error):
        _or_in_new_file(path, add)


def _or_in_new_file(path: Path, add: Callable[[], None]) -> None:
    try:
        add()
    except sqlite3.OperationalError:  # a full disk, a read-only folder, another process
        raise
    except sqlite3.DatabaseError:
        _delete(path)
        add()


def _delete(path: Path) -> None:
    for one in (path, _journal_of(path)):
        one.unlink(missing_ok=True)


def _journal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-journal")


def _flush_at_end(path: Path, pending: dict[bytes, bytes], limit_bytes: int, process: int) -> None:
    if os.getpid() == process:  # a fork has a copy of the answers that its parent will write
        _write(path, pending, limit_bytes)
