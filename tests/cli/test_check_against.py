"""`planner check --against`: the jobs of now with the files of then."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.cli import run
from tests.helpers.command_line import Capture

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("git") is None, reason="no git")]

CONFIG = """
[tool.planner]
gpus = ["RTX 4090"]
[tool.planner.jobs.net]
model = "train.py:build"
batch = 64
input = ["4096"]
target = "10"
loss = "mse"
"""
TRAIN = """
from torch import nn
from parts.widths import WIDTH


class Net(nn.Sequential):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4096, 512)
        self.wide = nn.Linear(512, WIDTH)
        self.last = nn.Linear(WIDTH, 10)


def build():
    return Net()
"""


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", *names, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a project in `sub`, whose branch `base` has a narrow layer, and now a wide one."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "sub"
    (folder / "src" / "parts").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(CONFIG)
    (folder / "train.py").write_text(TRAIN)
    (folder / "src" / "parts" / "widths.py").write_text("WIDTH = 256\n")
    git(tmp_path, "init", "-q", "-b", "base")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    (folder / "src" / "parts" / "widths.py").write_text("WIDTH = 100_000\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder / "src"))  # as a package that is installed from its folder
    yield tmp_path
    for name in ("parts", "parts.widths"):
        sys.modules.pop(name, None)


def answer(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["check", "--json", "--allow-code", "--no-cache", *arguments])
    checked: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, checked


def test_growth_is_found_in_its_module(project: Path, capsys: Capture) -> None:
    """A layer that is wider than then is named with its bytes, and the repository is left as it is."""
    before = git(project, "status", "--porcelain")
    code, checked = answer(capsys, "--against", "base")
    (change,) = checked["against"]["changes"]
    weight_bytes = 512 * (100_000 - 256) * 4
    assert (code, change["module"]["name"], change["exceeds"]) == (0, "wide", False)
    assert change["module"]["change_bytes"] > 2 * weight_bytes  # the weight and its gradient
    assert change["process_mib"] == checked["rows"][0]["process_mib"]
    assert change["process_mib_then"] + 2 * weight_bytes / 2**20 < change["process_mib"]
    assert git(project, "status", "--porcelain") == before
    assert len(git(project, "worktree", "list").splitlines()) == 1


def test_what_then_took_is_what_a_check_of_then_says(project: Path, capsys: Capture) -> None:
    """The process of then is that of the files of then, packages in src included."""
    _, checked = answer(capsys, "--against", "base")
    git(project, "stash", "-q")
    then = checked["against"]["changes"][0]["process_mib_then"]
    words = ["estimate", "--model", "train.py:build", "--batch", "64", "--gpu", "4090", "--input", "4096"]
    done = subprocess.run(
        ["planner", *words, "--target", "10", "--loss", "mse", "--json", "--no-cache"],
        cwd=project / "sub", env=_environment(project / "sub" / "src"), capture_output=True, text=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["process_mib"] == then


def _environment(source: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": f"{root}:{source}", "PATH": path}


def test_too_much_growth_is_a_no(project: Path, capsys: Capture) -> None:
    """More than --max-increase is exit code 1 and an error at the job's line."""
    assert run(["check", "--allow-code", "--against", "base", "--max-increase", "50%", "--annotations"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("::error file=sub/pyproject.toml,line=4,title=planner%3A net%3A +")
    assert "at batch 64 since base on RTX 4090 24GB, in module wide (+" in printed.err
    assert "Since base (" in printed.out
    assert answer(capsys, "--against", "base", "--max-increase", "20GiB")[0] == 0


def test_a_job_that_is_new_is_listed(project: Path, capsys: Capture) -> None:
    """A job whose model was not there then is no failure of the check."""
    config = project / "sub" / "pyproject.toml"
    config.write_text(CONFIG.replace("train.py:build", "new.py:build"))
    (project / "sub" / "new.py").write_text(TRAIN)
    code, checked = answer(capsys, "--against", "base")
    assert (code, checked["against"]["changes"]) == (0, [])
    assert [one["job"] for one in checked["against"]["missing"]] == ["net"]


def test_the_same_files_have_no_change(project: Path, capsys: Capture) -> None:
    """Against files that are the same, the process is the same."""
    git(project, "commit", "-q", "-a", "-m", "two")
    _, checked = answer(capsys, "--against", "HEAD")
    (change,) = checked["against"]["changes"]
    assert (change["change_mib"], change["module"], change["modules"]) == (0.0, None, [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--against", "nowhere"], "--against nowhere: no such revision"),
        (["--against", "--output=x"], "--against --output=x: no such revision"),
        (["--max-increase", "5%"], "--max-increase: it is that since a revision; name one"),
        (["--against", "base", "--max-increase", "5"], "--max-increase: expected a size such as"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(project: Path, capsys: Capture, arguments: list[str], expected: str) -> None:
    """A revision that is not there, or a size that makes no sense, is one line and exit code 2."""
    joined = [f"{arguments[0]}={arguments[1]}", *arguments[2:]]
    assert run(["check", "--allow-code", *joined]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert len(printed.err.splitlines()) == 1
