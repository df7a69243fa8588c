"""Answers and files without room, without a reader or without permission: one clear line."""

import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from calibration.observations import save_observation
from planner.cli import run
from planner.errors import DataFileError
from planner.hardware.calibration.files import Origins, add_points, key_of
from planner.hardware.calibration.fit import fit_points
from planner.hardware.calibration.model import Point
from planner.planning.sweep.results import ResultStore
from planner.planning.sweep.task import Task, TaskResult
from tests.helpers.file_readers import FIGURES
from tests.helpers.runs import RUN
from tests.helpers.structs import replace
from tests.helpers.traces import save_trace
from tests.store.test_codec import ABOUT, PROGRAM


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_an_answer_that_finds_no_room_is_one_line() -> None:
    """Standard output on a full disk has exit code 4, as a file that cannot be written, and no traceback."""
    command = [sys.executable, "-m", "planner", "devices", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (4, "planner: standard output: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("words", "code"), [("devices l4", 0), ("devices zzz", 1), ("devices --what", 2)])
def test_the_exit_code_is_right_where_nobody_reads(words: str, code: int, streams: str) -> None:
    """The exit code is that of the command, also without standard error or with a full one."""
    line = f'"{sys.executable}" -m planner {words} {streams}'
    assert subprocess.run(line, shell=True, capture_output=True).returncode == code


CLOSED = (
    "planner: standard output: is closed, so that the answer cannot be written; "
    "send it to /dev/null to discard it\n"
)


@pytest.mark.parametrize("streams", [">&-", "<&- >&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    "words",
    [
        "devices l4",
        "devices zzz",
        "cache --json",
        "max-batch --model conv_pair --gpu L4",
        "gpus --model conv_pair --filter L4 --csv",
        "estimate --help",
        "--version",
        "",
    ],
)
def test_an_answer_that_nobody_can_get_is_no_success(words: str, streams: str) -> None:
    """A closed standard output counts as a full disk: exit code 4 and one line, whatever the answer."""
    line = f'"{sys.executable}" -m planner {words} {streams}'
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (4, "" if "2>" in streams else CLOSED)


@pytest.mark.parametrize(("words", "code"), [("devices --what", 2), ("sweep /nowhere.yaml", 4)])
def test_an_error_before_the_answer_keeps_its_code(words: str, code: int) -> None:
    """If nothing was to be written, a closed standard output does not matter."""
    line = f'"{sys.executable}" -m planner {words} >&-'
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1)


def test_a_full_disk_gives_one_line_and_leaves_the_old_file(tmp_path: Path) -> None:
    """If a file may not grow, every writer notes it in one line, and what was there before is whole."""
    key, points = key_of(RUN), [Point(RUN, 1000)]
    task = Task("m", "r", RUN.job, (), {})
    writers: dict[str, Callable[[Path, int], object]] = {
        "trace": lambda folder, n: save_trace(
            PROGRAM, folder / "t.trace", {**ABOUT, "n": n, "pad": _noise()}
        ),
        "observation": lambda folder, n: save_observation(
            replace(RUN, about=_noise() * n), folder / "observation.json"
        ),
        "calibration": lambda folder, n: add_points(
            folder, key, [Point(replace(p.observation, batch=n), n) for p in points], ORIGINS, fit_points
        ),
        "sweep": lambda folder, n: ResultStore(folder, "", print).keep(
            task, TaskResult({"x": FIGURES}, (_noise() * n,))
        ),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder, 1)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            with pytest.raises(DataFileError) as caught:
                write(folder, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "File too large" in str(caught.value) and len(str(caught.value).splitlines()) == 1
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _noise() -> str:
    """Return a text that compression does not make small."""
    return "".join(random.Random(3).choices("0123456789abcdef", k=1000))


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/home"])
def test_a_home_that_cannot_be_written_gives_one_line(
    tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a home for its files, a plan still answers, and a sweep states what it cannot make."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home)
    assert run(["max-batch", "--model", "conv_pair", "--gpu", "L4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_batch"] > 0
    grid = tmp_path / "g.yaml"
    grid.write_text("about: a\nmodels: [conv_pair]\nrecipes: {sgd: {}}\ngpus: [L4]\n")
    assert run(["sweep", str(grid), "--results", f"{home}/r"]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"{home}/r: cannot be made" in lines[0] and "--results" in lines[0]


# ---- interrupts and other processes: nothing lost, nothing half-written


ORIGINS = Origins("measured", "a", "torch 2.13")
