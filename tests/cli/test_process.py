"""The process of a command: streams, exit codes, progress, imports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner._support.versions import installed_version
from planner.cli.output import progress
from tests.helpers.command_line import ROOT, Capture, outcome, python


@pytest.mark.slow
def test_process(tmp_path: Path) -> None:
    """A process prints the JSON alone on standard output, nothing on standard error, and exits with 0."""
    done = python("-m", "planner", "estimate", "--model", "conv_pair", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "conv_pair"


def test_process_that_fails(tmp_path: Path) -> None:
    """A process that fails prints one line on standard error and nothing on standard output."""
    done = python("-m", "planner", "estimate", "--model", "nothing", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_reader_that_went_away(toy_trace: Path) -> None:
    """The planner ends without a word if nobody reads standard output any more."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "planner", "estimate", "--trace", str(toy_trace)]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_version_names_what_answers_hang_on(capsys: Capture) -> None:
    """The planner's own version and that of torch, in one line."""
    code, out, err = outcome("--version", capsys)
    torch = installed_version("torch")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"planner \d+\.\d+\.\d+, torch {re.escape(torch or '')}(, torchvision \S+)?\n", out)


def test_help_loads_nothing_heavy() -> None:
    """`planner max-batch --help` loads neither torch, numpy, rich nor YAML."""
    code = (
        "import sys\n"
        "from planner.cli import run\n"
        "assert run(['max-batch', '--help']) == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = python("-c", code)
    assert done.returncode == 0
    assert set(done.stdout.splitlines()[-1].split()) & {"torch", "numpy", "rich", "yaml", "click"} == set()
    assert "--allocator-cap-mib" in done.stdout


class Terminal:
    """A standard error that claims to be a terminal."""

    def __init__(self) -> None:
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal each line of progress overwrites the one before, and the last is wiped."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress() as on_progress:
        on_progress("tracing batch 100")
        on_progress("tracing batch 3")
    assert terminal.written == "\rtracing batch 100\rtracing batch 3  \r               \r"
