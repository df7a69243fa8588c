"""Answers of a library that are cached for later plans: the same as its own, whatever happens to their file.

A fake process answers; cuDNN itself where pytest's option `--cudnn FOLDER` or a package has one.
"""

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import planner
from planner._support.worker import WorkerError
from planner.emulator.compiled import open_cudnn_with_cublaslt
from planner.errors import UsageError
from planner.hardware.cudnn import client
from planner.hardware.cudnn.answer_cache import NAME, AnswerCache
from planner.hardware.cudnn.client import Cudnn, open_cudnn
from planner.program.kernels.convolution import Convolution, Direction
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace

KEY = bytes(16)


@dataclass(eq=False)
class FakeWorker:
    """A process that takes 4 bytes for each number of x, and ends where it gets a GPU of capability 10.0."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    def request(self, message: dict[str, Any]) -> list[Any]:
        self.messages.append(message)
        if message["device"]["deviceVer"] == 1000:
            raise WorkerError(-11)
        images, channels, *_ = message["x"]
        answer = [7, ["tensor cores"], 4 * images * channels]
        return [answer, [8, [], 0]] if message["every"] else [answer]


@dataclass(eq=False)
class FakeLibrary:
    """A folder with a file of cuDNN's name, and the processes that were started for it."""

    folder: Path
    processes: list[FakeWorker] = field(default_factory=list)

    @property
    def queries(self) -> int:
        """Return the number of queries so far."""
        return sum(len(process.messages) for process in self.processes)

    def start(self, *_: object) -> tuple[FakeWorker, int]:
        """Start a process."""
        self.processes.append(FakeWorker())
        return self.processes[-1], 92000

    def reopen(self, cache: Path | None) -> Cudnn:
        """Open the library as a new process would."""
        flush_all()
        return open_cudnn(str(self.folder), lambda _: self.folder / "libcublasLt.so.13", "a GPU", cache)


def flush_all() -> None:
    """Do what the end of a process does."""
    for opened in _OPENED:
        opened.flush()
    client._open.cache_clear()


_OPENED: list[AnswerCache] = []


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note each cache that a library is given."""

    def open_noted(folder: Path) -> AnswerCache:
        _OPENED.append(AnswerCache(folder))
        return _OPENED[-1]

    monkeypatch.setattr(client, "open_answer_cache", open_noted)
    client._open.cache_clear()
    yield
    _OPENED.clear()
    client._open.cache_clear()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Return a library whose processes are fakes."""
    fake = FakeLibrary(tmp_path / "nvidia" / "cudnn" / "lib")
    fake.folder.mkdir(parents=True)
    for name in ("libcudnn.so.9", "libcublasLt.so.13"):
        (fake.folder / name).write_bytes(b"a library")
    monkeypatch.setattr(client, "_start", fake.start)
    monkeypatch.setattr("planner.emulator.compiled.cublaslt_for", lambda _: fake.folder / "libcublasLt.so.13")
    return fake


def convolution_of(batch: int) -> Convolution:
    x, w, ones = (batch, 64, 28, 28), (64, 64, 3, 3), (1, 1)
    return Convolution(Direction.FORWARD, "float32", x, w, x, False, ones, ones, ones)


# ---- plans


def test_a_second_plan_asks_nothing(library: FakeLibrary, tmp_path: Path) -> None:
    """It has the answers of the first one, on another GPU of the same compute capability too, and starts no
    process of the library.
    """
    options: dict[str, Any] = {"cudnn": str(library.folder), "input": "3x64x64", "cache": tmp_path / "cache"}
    first = planner.max_batch("torchvision:alexnet", gpu="rtx-3060", **options)
    assert library.queries > 0
    asked, started = library.queries, len(library.processes)
    flush_all()
    second = planner.max_batch("torchvision:alexnet", gpu="rtx-3060", **options)
    assert second.plan.search == first.plan.search
    assert first.plan.at_max is not None and second.plan.at_max is not None
    assert second.plan.at_max.run == first.plan.at_max.run
    assert (library.queries, len(library.processes)) == (asked, started)
    flush_all()
    planner.estimate("torchvision:alexnet", batch=first.plan.search.largest, gpu="rtx-3090", **options)
    assert (library.queries, len(library.processes)) == (asked, started)


def test_a_plan_without_a_cache_asks_and_stores_nothing(library: FakeLibrary, tmp_path: Path) -> None:
    """It does not read what another plan stored either."""
    options: dict[str, Any] = {"cudnn": str(library.folder), "input": "3x64x64", "gpu": "rtx-3060"}
    planner.estimate("torchvision:alexnet", batch=8, cache=tmp_path / "cache", **options)
    asked = library.queries
    flush_all()
    planner.estimate("torchvision:alexnet", batch=8, **options)
    assert library.queries == 2 * asked
    assert [path.parent.name for path in tmp_path.rglob(NAME)] == ["cache"]


# ---- one library


def test_answers_are_those_of_the_library(library: FakeLibrary, tmp_path: Path) -> None:
    """The first of all engines, or all of them; what one process asked, the next one does not."""
    first = library.reopen(tmp_path)
    expected = [first.engines(AMPERE, 28, convolution_of(8), every=every) for every in (False, True)]
    assert [len(engines) for engines in expected] == [1, 2]
    asked = library.queries
    second = library.reopen(tmp_path)
    assert [second.engines(AMPERE, 28, convolution_of(8), every=every) for every in (False, True)] == expected
    assert second.version == first.version == "9.20.0"
    assert library.queries == asked
    second.workspaces(AMPERE, 28, convolution_of(9))
    assert library.queries == asked + 1


def test_the_number_of_multiprocessors_counts_on_older_gpus_alone(
    library: FakeLibrary, tmp_path: Path
) -> None:
    """The answers depend on it on 7.5 and not from 8.0 on, as in memory."""
    first = library.reopen(tmp_path)
    for capability in ((7, 5), (8, 6)):
        first.workspaces(capability, 40, convolution_of(8))
    second, asked = library.reopen(tmp_path), library.queries
    second.workspaces((8, 6), 68, convolution_of(8))
    second.workspaces((7, 5), 40, convolution_of(8))
    assert library.queries == asked
    second.workspaces((7, 5), 68, convolution_of(8))
    second.workspaces((8, 9), 68, convolution_of(8))
    assert library.queries == asked + 2


def test_a_query_that_ends_the_process_is_no_answer(library: FakeLibrary, tmp_path: Path) -> None:
    """The next plan asks again, and reports that there is none."""
    for _ in range(2):
        opened, asked = library.reopen(tmp_path), library.queries
        assert opened.workspaces((10, 0), 148, convolution_of(8)).engine is None
        assert opened.silent == {(10, 0)}
        assert library.queries == asked + 1


@pytest.mark.parametrize("changed", ["library", "time", "stand-in", "environment", "beside"])
def test_another_library_is_asked(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """One of another size or time, with another stand-in of cuBLASLt, compiler beside it, or environment."""
    library.reopen(tmp_path).workspaces(AMPERE, 28, convolution_of(8))
    match changed:
        case "library":
            (library.folder / "libcudnn.so.9").write_bytes(b"another library")
        case "time":
            os.utime(library.folder / "libcudnn.so.9", (1, 1))
        case "stand-in":
            (library.folder / "libcublasLt.so.13").write_bytes(b"another stand-in")
        case "environment":
            monkeypatch.setenv("PLANNER_EMULATED_CUBLASLT_WORKSPACE", "4194304")
        case "beside":
            beside = library.folder.parent.parent / "cu13" / "lib"
            beside.mkdir(parents=True)
            (beside / "libnvrtc.so.13").write_bytes(b"a compiler")
    asked = library.queries
    library.reopen(tmp_path).workspaces(AMPERE, 28, convolution_of(8))
    assert library.queries == asked + 1


def test_a_library_without_cublaslt_is_asked_each_time(library: FakeLibrary, tmp_path: Path) -> None:
    """The driver of the machine decides what it answers, and no key holds that."""
    for _ in range(2):
        client._open.cache_clear()
        asked = library.queries
        opened = open_cudnn(str(library.folder), lambda _: "none was given", "a GPU", tmp_path)
        opened.workspaces(AMPERE, 28, convolution_of(8))
        assert library.queries == asked + 1
    assert not (tmp_path / NAME).exists()


def test_cudnns_own_answers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Cached answers equal those without a cache, and no process is started for them."""
    where = request.config.getoption("--cudnn") or "installed"
    try:
        plain = open_cudnn_with_cublaslt(where)
    except UsageError as error:
        pytest.skip(f"no cuDNN to ask: {error}")
    if plain.lacks:
        pytest.skip(f"cuBLASLt has no stand-in: {plain.lacks}")
    queries = [replace(convolution_of(8), direction=direction) for direction in Direction]
    kinds = [(capability, every) for capability in ((7, 5), AMPERE) for every in (False, True)]
    expected = [plain.engines(of, 40, one, every=every) for of, every in kinds for one in queries]
    for _ in range(2):
        flush_all()
        cached = open_cudnn_with_cublaslt(where, tmp_path)
        assert [
            cached.engines(of, 40, one, every=every) for of, every in kinds for one in queries
        ] == expected
    assert cached.version == plain.version and cached._workers == {}


# ---- the file


def read(folder: Path, keys: Mapping[bytes, object]) -> dict[bytes, bytes]:
    """Return the answers that a new process finds."""
    cache = AnswerCache(folder)
    return {key: answer for key in keys if (answer := cache.get(key)) is not None}


def write(folder: Path, answers: Mapping[bytes, bytes], **options: Any) -> None:
    """Store answers as one process."""
    cache = AnswerCache(folder, **options)
    for key, answer in answers.items():
        cache.put(key, answer)
    cache.flush()


def answers_of(numbers: range) -> dict[bytes, bytes]:
    return {number.to_bytes(16, "big"): b"answer %d" % number for number in numbers}


def test_answers_are_found_before_they_are_written(tmp_path: Path) -> None:
    """In the process that stores them."""
    cache = AnswerCache(tmp_path)
    cache.put(KEY, b"answer")
    assert cache.get(KEY) == b"answer"


def _cut(file: Path) -> None:
    os.truncate(file, 5000)


def _overwrite(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("spoil", [_cut, _overwrite, _empty])
def test_damaged_files_are_begun_again(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """An unreadable file has no answers; those of later queries are stored."""
    old, new = answers_of(range(100)), answers_of(range(100, 200))
    write(tmp_path, old)
    spoil(tmp_path / NAME)
    assert read(tmp_path, old).items() <= old.items()
    write(tmp_path, new)
    assert read(tmp_path, new) == new


def test_a_changed_byte_is_no_answer(tmp_path: Path) -> None:
    """Neither in an answer nor in its key; the other answers stay."""
    answers = answers_of(range(3))
    write(tmp_path, answers)
    file = tmp_path / NAME
    file.write_bytes(file.read_bytes().replace(b"answer 1", b"answer 7"))
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE answers SET key = ? WHERE key = ?", (b"another", (2).to_bytes(16, "big")))
    assert read(tmp_path, {**answers, b"another": b""}) == answers_of(range(1))
    write(tmp_path, answers)
    assert read(tmp_path, answers) == answers


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    """Answers are found, none is written, and nothing fails."""
    old = answers_of(range(3))
    write(tmp_path, old)
    with unwritable(tmp_path):
        write(tmp_path, answers_of(range(3, 6)))
        write(tmp_path / "new", old)
    assert read(tmp_path, answers_of(range(6))) == old


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Make the folder and its file such that no one may write, root neither."""
    if os.geteuid():
        for path in (folder / NAME, folder):
            path.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    with_attribute = shutil.which("chattr")
    if with_attribute is None:
        pytest.skip("root may write everywhere")
    paths = [str(folder), str(folder / NAME)]
    if subprocess.run([with_attribute, "+i", *paths], capture_output=True, check=False).returncode:
        pytest.skip("root may write everywhere")
    try:
        yield
    finally:
        subprocess.run([with_attribute, "-i", *paths], check=True)


def test_a_full_disk_leaves_what_stood_there(tmp_path: Path) -> None:
    """The file stays whole, and nothing fails."""
    old, new = answers_of(range(100)), answers_of(range(1000, 9000))
    write(tmp_path, old)
    room = (tmp_path / NAME).stat().st_size + 5000
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        write(tmp_path, new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert read(tmp_path, old | new) == old
    write(tmp_path, new)
    assert read(tmp_path, old | new) == old | new


def test_the_older_half_goes_where_the_file_grows_too_large(tmp_path: Path) -> None:
    """The newest answers stay, and the file does not grow further."""
    limit_bytes = 256 * 2**10
    for first in range(0, 30_000, 1000):
        newest = answers_of(range(first, first + 1000))
        write(tmp_path, newest, limit_bytes=limit_bytes)
        assert read(tmp_path, newest) == newest
    answers, size_bytes = AnswerCache(tmp_path).stats()
    assert answers < 10_000 and size_bytes < 1.5 * limit_bytes
    assert read(tmp_path, answers_of(range(1000))) == {}


def test_clearing_and_statistics(tmp_path: Path) -> None:
    """`clear` deletes the file, and nothing else; a folder without one has no answers."""
    cache = AnswerCache(tmp_path)
    assert cache.stats() == cache.clear() == (0, 0)
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, answers_of(range(3)))
    stats = cache.stats()
    assert stats == (3, (tmp_path / NAME).stat().st_size) == cache.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / NAME).write_bytes(b"no database")
    assert cache.clear() == (0, 11)
    assert not (tmp_path / NAME).exists()


WRITER = """
import sys
from pathlib import Path
from planner.hardware.cudnn.answer_cache import AnswerCache
first, folder = int(sys.argv[1]), Path(sys.argv[2])
cache = AnswerCache(folder)
for number in range(first, first + 510):
    cache.put(number.to_bytes(16, "big"), b"answer %d" % number)
    if number % 50 == 49:
        cache.flush()
        print(number + 1, flush=True)
"""


def writer(folder: Path, first: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(first), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_a_file(tmp_path: Path) -> None:
    """The answers of each of three are there, those left to its end too."""
    processes = [writer(tmp_path, first) for first in (0, 1000, 2000)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    for process in processes:
        process.communicate()
    expected = {
        key: one for first in (0, 1000, 2000) for key, one in answers_of(range(first, first + 510)).items()
    }
    assert read(tmp_path, expected) == expected


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    """The answers that it reported as written are there, and the next process reads and writes."""
    for delay in (0.0, 0.003, 0.01):
        process = writer(tmp_path, 0)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        written = max([50, *map(int, process.stdout.read().split())])
        process.wait()
        expected = answers_of(range(written))
        assert read(tmp_path, expected) == expected
        write(tmp_path, answers_of(range(5000, 5010)))
        AnswerCache(tmp_path).clear()


def test_a_fork_leaves_its_parents_answers_to_it(tmp_path: Path) -> None:
    """A forked child that ends does not write what its parent has not written yet."""
    code = f"""
import os
from pathlib import Path
from planner.hardware.cudnn.answer_cache import AnswerCache
cache = AnswerCache(Path({str(tmp_path)!r}))
cache.put(bytes(16), b"answer")
if os.fork() == 0:
    raise SystemExit
os.wait()
assert not Path({str(tmp_path / NAME)!r}).exists()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert read(tmp_path, {KEY: b""}) == {KEY: b"answer"}
