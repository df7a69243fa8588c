"""Signals in a model's code: the process ends at once, with one line and the code of the signal.

A child gets the default disposition of each signal; what the parent ignores does not count. The model sends
the signal to its own process, so that the moment does not depend on the machine. `--runs N` sets how many
random moments of a plan are tried.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import rmtree

import pytest

MODEL = """
import os, signal, sys, threading
import torch
from torch import nn

NUMBER = int(os.environ["NUMBER"])

def send():
    os.kill(os.getpid(), NUMBER)
    for _ in range(1000):
        pass  # the handler runs between two instructions

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.build()

    def build(self):
        pass

    def act(self):
        pass

    def forward(self, x):
        self.act()
        return self.head(x)

class Constructor(Net):
    def build(self):
        send()

class Forward(Net):
    def act(self):
        send()

class SwallowsAll(Net):
    def act(self):
        try:
            send()
        except BaseException:
            pass

class SwallowsAlways(Net):
    def act(self):
        while True:
            try:
                send()
            except:
                pass

class Finalizer(Net):
    def act(self):
        class Sends:
            def __del__(self):
                send()
        Sends()

class Backward(Net):
    def forward(self, x):
        out = self.head(x)
        out.register_hook(lambda gradient: send())
        return out

class Raises(Net):
    def act(self):
        try:
            send()
        except BaseException as error:
            raise ValueError("something else") from error
"""
AT_IMPORT = "import os, signal\nos.kill(os.getpid(), int(os.environ['NUMBER']))\n" + MODEL
LINES = {signal.SIGTERM: (143, "planner: ended by SIGTERM\n"), signal.SIGINT: (130, "planner: interrupted\n")}
WHILE_TORCH_IMPORTS = """
import os, sys

class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.functional":
            try:
                os.kill(os.getpid(), int(os.environ["NUMBER"]))
                for _ in range(1000):
                    pass
            except BaseException:
                print("torch's import is cut short", file=sys.stderr)
                raise

sys.meta_path.insert(0, Sends())
"""
PLAN = ["--input", "4", "--target", "scalar:int64", "--gpu-mib", "2000", "--no-cache"]
NAMES = (
    *("Constructor", "Forward", "SwallowsAll", "SwallowsAlways", "Finalizer", "Backward", "Raises"),
    "at import",
)


MANY = 1000  # --runs of make soak


def _default_signals() -> None:
    for number in LINES:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LINES)


def start(words: list[str], number: int = 0, **variables: str) -> "subprocess.Popen[str]":
    """Start a command of the planner with the default disposition of signals and variables of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "planner", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NUMBER": str(int(number)), **variables},
        preexec_fn=_default_signals,
        start_new_session=True,
    )


def wait_for_handlers(process: "subprocess.Popen[str]") -> None:
    """Wait until the planner handles SIGTERM; before, the interpreter is starting."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        (caught,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", LINES)
@pytest.mark.parametrize("name", NAMES)
def test_a_signal_passes_through_the_code_of_a_model(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    """SIGTERM and Ctrl-C end the plan wherever a model's code is, even if that code swallows exceptions."""
    file = tmp_path / "net.py"
    file.write_text(AT_IMPORT if name == "at import" else MODEL)
    model = f"{file}:{'Net' if name == 'at import' else name}"
    process = start(["max-batch", "--model", model, *PLAN], number)
    output, errors = process.communicate()
    assert (process.returncode, output, errors) == (LINES[number][0], "", LINES[number][1])


@pytest.mark.slow
@pytest.mark.parametrize("number", LINES)
def test_a_signal_waits_for_the_import_of_torch(tmp_path: Path, number: signal.Signals) -> None:
    """An exception that passed through torch's C++ code there would end the process by `std::terminate`."""
    (tmp_path / "sitecustomize.py").write_text(WHILE_TORCH_IMPORTS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = start(["max-batch", "--model", "conv_pair", *PLAN[-3:]], number, PYTHONPATH=path)
    output, errors = process.communicate()
    assert (process.returncode, output, errors) == (LINES[number][0], "", LINES[number][1])


def _commands(folder: Path) -> dict[str, list[str]]:
    """Return the words of each command that plans, with a model of a file in the folder."""
    file, grid = folder / "net.py", folder / "grid.yaml"
    file.write_text(MODEL)
    grid.write_text("about: short\nmodels: [conv_pair]\nrecipes: {a: {}, b: {steps: 4}}\ngpus: [L4]\n")
    (folder / "pyproject.toml").write_text(
        '[tool.planner.jobs.net]\nmodel = "conv_pair"\nbatch = 2\nbudget = "16GiB"\n'
    )
    job = ["--model", f"{file}:Net", "--input", "4", "--target", "scalar:int64", "--no-cache"]
    on_gpu = [*job, "--gpu-mib", "2000"]
    return {
        "max-batch": ["max-batch", *on_gpu],
        "estimate": ["estimate", *on_gpu, "--batch", "8"],
        "explain": ["explain", *on_gpu, "--batch", "8"],
        "advise": ["advise", *on_gpu, "--batch", "16000000"],
        "gpus": ["gpus", *job],
        "sweep": ["sweep", str(grid), "--jobs", "2"],
        "check": ["check", "--config", str(folder / "pyproject.toml"), "--no-cache"],
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc tells which signals are handled")
@pytest.mark.parametrize("number", LINES)
@pytest.mark.parametrize("name", ["max-batch", "estimate", "explain", "advise", "gpus", "sweep", "check"])
def test_a_signal_at_any_moment(
    tmp_path: Path, name: str, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    """A signal at a random moment of a command ends it with its code, or finds the answer given."""
    if int(request.config.getoption("--runs")) < MANY:
        pytest.skip("moments are drawn by make soak alone")
    words = _commands(tmp_path)[name]
    process = start(words)
    wait_for_handlers(process)
    handled = time.monotonic()
    answer, errors = process.communicate()
    assert answer and process.returncode in (0, 1), errors
    code, seconds = process.returncode, time.monotonic() - handled
    runs = max(1, int(request.config.getoption("--runs")) // 5)
    ended = 0
    for _ in range(runs):
        rmtree(tmp_path / "grid.results", ignore_errors=True)
        process = start(words)
        wait_for_handlers(process)
        time.sleep(random.uniform(0, seconds))
        process.send_signal(number)
        output, errors = process.communicate()
        if process.returncode == code:
            assert output.startswith(answer[:20])
            continue
        assert (process.returncode, errors) == LINES[number]
        ended += 1
    print(f"\n{name}, {number.name}: {runs} runs, {ended} ended in one line, {runs - ended} done before")
