"""Caches into which another account could write: nothing planted there runs, is followed or waited for.

Files of another account need an account that may make them: those tests run as root alone.
"""

import os
import stat
import sys
from pathlib import Path

import pytest

from planner.emulator.child.libraries.build import _compiled
from planner.emulator.child.libraries.private import is_sealed, open_private
from planner.emulator.child.libraries.tools import EmulatorError
from planner.hardware.cudnn.answer_cache import NAME, AnswerCache
from planner.program.events import Phase, PhaseStart, Trace
from planner.program.program import constant_program
from planner.store.cache_dir import CacheDirectory
from tests.helpers.traces import GA102

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes of Unix")
IS_ROOT = sys.platform != "win32" and os.geteuid() == 0
KEY = {"number": 1}


def compiled(cache: Path, content: bytes = b"ours") -> Path:
    """Compile one library into a cache, or find it there."""

    def compile_into(work: Path, out: Path) -> None:
        (out / "libone.so").write_bytes(content)
        (out / "libother.so").symlink_to("libone.so")

    return _compiled(cache, "key", "for a test", compile_into)


def put(folder: Path, lines: list[str]) -> None:
    small = Trace((PhaseStart(0, Phase.SETUP),), (), 2)
    CacheDirectory(folder, lines.append).put(KEY, [constant_program(small, GA102)], {})


# ---- compiled libraries


def test_a_compiled_library_is_found_again(tmp_path: Path) -> None:
    """What was compiled is not compiled again, and nobody else may enter its folder."""
    cache = tmp_path / "emulator"
    folder = compiled(cache)
    assert compiled(cache, b"again") == folder
    assert (folder / "libone.so").read_bytes() == b"ours"
    assert [stat.S_IMODE(one.stat().st_mode) for one in (cache, folder)] == [0o700, 0o700]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "libone.so").write_bytes(b"cut"),
        lambda folder: (folder / "libone.so").unlink(),
        lambda folder: (folder / "libmore.so").write_bytes(b"planted"),
        lambda folder: (folder / "complete").write_text("{"),
        lambda folder: (folder / "complete").write_text(""),
        lambda folder: folder.chmod(0o777),
    ],
)
def test_a_damaged_library_is_compiled_again(tmp_path: Path, damage: object) -> None:
    """A library that is cut, missing, added or open to others is compiled again, and not loaded."""
    cache = tmp_path / "emulator"
    folder = compiled(cache)
    assert callable(damage)
    damage(folder)
    assert not is_sealed(folder)
    assert (compiled(cache, b"again") / "libone.so").read_bytes() == b"again"
    assert is_sealed(folder)


def test_a_cache_that_others_may_write_into_is_begun_anew(tmp_path: Path) -> None:
    """Libraries in a folder that was made under umask 000 may be anybody's, even if they look complete."""
    cache = tmp_path / "emulator"
    compiled(cache, b"planted")
    cache.chmod(0o777)
    assert (compiled(cache) / "libone.so").read_bytes() == b"ours"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_cache_is_private_under_any_umask(tmp_path: Path) -> None:
    """The umask of the process does not open the folders of compiled libraries."""
    before = os.umask(0)
    try:
        folder = compiled(tmp_path / "home" / "emulator")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_planted_lock_is_not_followed(tmp_path: Path) -> None:
    """A link in place of the lock file leads nowhere: its target keeps its content."""
    cache, target = tmp_path / "emulator", tmp_path / "precious"
    target.write_text("mine")
    cache.mkdir(mode=0o700)
    (cache / "lock").symlink_to(target)
    with pytest.raises(EmulatorError, match="the compiled libraries cannot be cached there"):
        compiled(cache)
    assert target.read_text() == "mine"


@pytest.mark.skipif(not IS_ROOT, reason="only root makes files of another account")
def test_a_cache_of_another_account_is_refused(tmp_path: Path) -> None:
    """Libraries of another account are not loaded, whether it owns the folder, a link to it or one within."""
    cache = tmp_path / "emulator"
    folder = compiled(cache, b"planted")
    os.chown(folder, 12_345, 12_345)
    assert not is_sealed(folder)
    assert (compiled(cache) / "libone.so").read_bytes() == b"ours"
    os.chown(cache, 12_345, 12_345)
    with pytest.raises(EmulatorError, match="belongs to another account, so that no library is loaded"):
        compiled(cache)
    os.chown(cache, 0, 0)
    link = tmp_path / "link"
    link.symlink_to(cache)
    os.chown(link, 12_345, 12_345, follow_symlinks=False)
    with pytest.raises(EmulatorError, match="belongs to another account"):
        open_private(link)


# ---- traces and answers


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """A link in place of a cached trace or of the answers is replaced; its target keeps its content."""
    lines: list[str] = []
    folder, target = tmp_path / "cache", tmp_path / "precious"
    put(folder, lines)
    (path,) = folder.glob("*.trace")
    target.write_text("mine")
    target.chmod(0o600)
    before = target.stat()
    for planted in (path, folder / NAME):
        planted.unlink(missing_ok=True)
        planted.symlink_to(target)
    put(folder, lines)
    answers = AnswerCache(folder)
    answers.put(b"key", b"answer")
    answers.flush()
    assert AnswerCache(folder).get(b"key") == b"answer"
    assert target.read_text() == "mine" and target.stat().st_mtime_ns == before.st_mtime_ns
    assert not path.is_symlink() and not (folder / NAME).is_symlink()
    assert lines == []


def test_a_planted_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe in place of a cached trace or of the answers is a miss, and is replaced."""
    lines: list[str] = []
    put(tmp_path, lines)
    (path,) = tmp_path.glob("*.trace")
    for planted in (path, tmp_path / NAME):
        planted.unlink(missing_ok=True)
        os.mkfifo(planted)
    assert CacheDirectory(tmp_path, lines.append).get(KEY) is None
    assert len(lines) == 1 and "it is no regular file" in lines[0]
    answers = AnswerCache(tmp_path)
    assert answers.get(b"key") is None
    answers.put(b"key", b"answer")
    answers.flush()
    assert AnswerCache(tmp_path).get(b"key") == b"answer"


def test_a_new_cache_is_private(tmp_path: Path) -> None:
    """The folder of traces and answers is made for its account alone, whatever the umask."""
    before = os.umask(0)
    try:
        put(tmp_path / "traces", [])
        answers = AnswerCache(tmp_path / "answers")
        answers.put(b"key", b"answer")
        answers.flush()
    finally:
        os.umask(before)
    for folder in (tmp_path / "traces", tmp_path / "answers"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_planted_name_of_a_half_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name under which a file is written first may be guessed: a link there is not written through."""
    from planner._support import atomic_write

    target = tmp_path / "precious"
    target.write_text("mine")
    monkeypatch.setattr(atomic_write.os, "getpid", lambda: 7)
    monkeypatch.setattr(atomic_write.threading, "get_ident", lambda: 8)
    (tmp_path / "answer.7-8.partial").symlink_to(target)
    atomic_write.write_bytes(tmp_path / "answer", b"ours")
    assert (tmp_path / "answer").read_bytes() == b"ours"
    assert target.read_text() == "mine"
