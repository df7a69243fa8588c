"""Processes that a command or a model starts: none is left, however it was started and whatever it ignores.

Each started process writes its number into a file, so that the tests wait for no time.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner import max_batch
from planner._support.processes import end_processes, marked_processes
from planner.emulator.launch import RunOptions, run_emulated
from planner.errors import ModelError
from planner.hardware import find_device

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="/proc tells of processes"),
]

# Starts a child of a kind, waits until it has written its number, and lives on or ends.
SCRIPT = """
import os, signal, subprocess, sys, time
kind, numbers, lives = sys.argv[1:]
CHILD = "import os, signal, sys, time\\n" \\
    "for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(one, signal.SIG_IGN)\\n" \\
    f"open({numbers!r}, 'a').write(f'{{os.getpid()}}\\\\n')\\n" \\
    "while True: time.sleep(1)\\n"
if kind == "forked":
    if os.fork() == 0:
        exec(CHILD)
elif kind == "shell":
    subprocess.Popen(["sh", "-c", f'"$0" -c "$1" & wait', sys.executable, CHILD])
elif kind == "session":
    subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
elif kind == "daemon":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            exec(CHILD)
        os._exit(0)
    os.wait()
elif kind == "itself":
    exec(CHILD)
while not os.path.exists(numbers):
    time.sleep(0.01)
while lives == "lives":
    time.sleep(1)
"""
KINDS = ("forked", "shell", "session", "daemon", "itself")
MODEL = """
import subprocess, sys
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        subprocess.run([sys.executable, {script!r}, "daemon", {numbers!r}, "ends"], check=True)
    def forward(self, x):
        return self.head(x)
"""


def is_alive(number: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[:1]
    except OSError:
        return False


def started(numbers: Path) -> list[int]:
    """Return the numbers of the started processes, of which there is at least one."""
    while not numbers.exists() or not numbers.read_text().endswith("\n"):
        time.sleep(0.01)
    return [int(line) for line in numbers.read_text().splitlines()]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "itself"])
def test_a_command_that_ends_leaves_nothing(script: Path, tmp_path: Path, kind: str) -> None:
    """Children that go on when their command has ended are ended, though they ignore SIGTERM."""
    numbers, options = tmp_path / "numbers", RunOptions(find_device("L4"))
    command = [sys.executable, str(script), kind, str(numbers), "ends"]
    with pytest.raises(ModelError, match="it ended without using a GPU"):
        run_emulated(command, options, tmp_path, print)
    assert not any(map(is_alive, started(numbers)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_for_the_planner_alone_leaves_nothing(
    script: Path, tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    """If the planner alone gets a signal, and another one on top, all processes of its command end."""
    numbers = tmp_path / "numbers"
    words = ["run", "--gpu", "L4", "--", sys.executable, str(script), kind, str(numbers), "lives"]
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGTERM, signal.SIGINT)],
    )
    left = started(numbers)
    process.send_signal(number)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert errors.splitlines()[-1].startswith("planner: ")
    assert not any(map(is_alive, left))


def test_an_isolated_model_leaves_no_daemon(script: Path, tmp_path: Path) -> None:
    """A daemon that a model makes ends with the process of the model."""
    numbers, file = tmp_path / "numbers", tmp_path / "net.py"
    file.write_text(MODEL.format(script=str(script), numbers=str(numbers)))
    plan = max_batch(f"{file}:Net", input="4", target="scalar:int64", gpu_mib=2000, isolate=True)
    assert plan.max_batch > 0
    del plan
    left = started(numbers)
    assert left and not any(map(is_alive, left))


def test_marked_processes_are_found_and_ended(tmp_path: Path) -> None:
    """A mark finds the processes that were started with it, and no others."""
    mark = f"PLANNER_TEST={tmp_path}"
    name, _, value = mark.partition("=")
    assert marked_processes(mark) == frozenset()
    process = subprocess.Popen(["sleep", "1000"], env={**os.environ, name: value})
    other = subprocess.Popen(["sleep", "1000"])
    try:
        assert marked_processes(mark) == {process.pid}
        assert end_processes(mark, 5.0) == frozenset()
        assert process.wait() == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for one in (process, other):
            one.kill()
            one.wait()
