"""Files that are written whole or not at all."""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from planner._support.atomic_write import save, write_bytes
from planner.errors import DataFileError

WAYS = pytest.mark.parametrize("write", [partial(save, what="it"), write_bytes])
Write = Callable[[Path, bytes], None]


@WAYS
def test_nothing_else_is_left(write: Write, tmp_path: Path) -> None:
    """The new content stands in place of the old one, and no partial file beside it."""
    file = tmp_path / "kept"
    file.write_bytes(b"old")
    write(file, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"kept": b"new"}


@WAYS
def test_a_link_stays_one(write: Write, tmp_path: Path) -> None:
    """The target of a link is replaced, in its own folder."""
    (tmp_path / "runs").mkdir()
    file, link = tmp_path / "runs" / "monday", tmp_path / "latest"
    file.write_bytes(b"old")
    link.symlink_to(file)
    write(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "runs"]


@WAYS
def test_a_link_to_itself_is_refused(write: Write, tmp_path: Path) -> None:
    """A link to itself is one line, as from the system's own calls."""
    link = tmp_path / "latest"
    link.symlink_to(link)
    with pytest.raises(DataFileError, match="latest: .*Too many levels of symbolic links"):
        write(link, b"new")


@WAYS
def test_a_pipe_stays_one(write: Write, tmp_path: Path) -> None:
    """The reader of a pipe gets the content."""
    pipe, contents = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: contents.append(pipe.read_bytes()))
    reader.start()
    write(pipe, b"content")
    reader.join()
    assert contents == [b"content"]
    assert pipe.is_fifo()


def test_a_full_disk_raises_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is one line and leaves no partial file beside the old one."""
    file = tmp_path / "kept"
    file.write_bytes(b"old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planner._support.atomic_write.os.fsync", full)
    with pytest.raises(DataFileError, match="kept: cannot be written: No space left on device"):
        write_bytes(file, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"kept": b"old"}
