"""Protect a folder of files that run as code.

Other accounts cannot write into it, and changes are detected.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .tools import EmulatorError

MANIFEST = "complete"  # the digests of a folder's files, written last
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LARGEST_BYTES = 2**28


def open_private(folder: Path) -> None:
    """Create a folder, or replace it by an empty one if accounts other than this and root can write into it.

    A folder that is private already is left as it is. Raises EmulatorError if the folder belongs to an
    account other than this or root, OSError if it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for status in (os.lstat(folder), folder.stat()):  # of a link, and of the folder behind it
        if status.st_uid not in (os.geteuid(), 0):
            raise EmulatorError(
                f"{folder}: belongs to another account, so that no library is loaded from there; set "
                "XDG_CACHE_HOME to a folder of your own"
            )
    if folder.stat().st_mode & _OTHERS_WRITE:
        aside = folder.with_name(f"{folder.name}.{os.getpid()}.open")
        folder.rename(aside)
        folder.mkdir(mode=0o700)
        shutil.rmtree(aside, ignore_errors=True)


def seal(folder: Path) -> None:
    """Write digests of a folder's files into the folder, which mark it as complete."""
    digests = {path.name: _digest(path) for path in _files(folder)}
    (folder / MANIFEST).write_text(json.dumps(digests, sort_keys=True), encoding="utf-8")


def is_sealed(folder: Path) -> bool:
    """Return whether a folder holds exactly the files that `seal` found in it, unchanged.

    Returns False if accounts other than this and root can write into the folder.
    """
    with suppress(OSError, ValueError):
        status, manifest = os.lstat(folder), folder / MANIFEST
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0)
        if not is_own or status.st_mode & _OTHERS_WRITE or not stat.S_ISREG(os.lstat(manifest).st_mode):
            return False
        digests = json.loads(manifest.read_text(encoding="utf-8"))
        return bool(digests == {path.name: _digest(path) for path in _files(folder)})
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file inside the context.

    A missing file is created. Raises OSError if the file is a symbolic link.
    """
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != MANIFEST)


def _digest(path: Path) -> str:
    """Return a digest of a regular file, or a text with the target of a symbolic link.

    Raises ValueError for anything else, and for a file above 256 MiB.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return f"link to {path.readlink()}"
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_BYTES:
        raise ValueError(f"{path} is no library")
    return hashlib.sha256(path.read_bytes()).hexdigest()
