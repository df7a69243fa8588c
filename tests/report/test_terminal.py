"""Reports on a terminal: rich's tables have the words of the plain texts, and a pipe gets the plain texts."""

import io
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor, nn

import planner
from planner.cli.commands.devices import DevicesResult
from planner.cli.output import progress_line
from planner.hardware.database import find_device, load_devices

BIN = Path(sys.executable).parent
JOB: Any = {"input": "16", "target": "scalar:int64", "loss": "cross_entropy", "optimizer": "adamw"}


class Net(nn.Module):
    """Large enough that a batch fails on a GPU of a few hundred MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def net() -> Net:
    return Net()


def few_gpus(**options: Any) -> object:
    return planner.gpus(
        net, devices=[find_device(name) for name in ("4090", "t4", "a100-80")], **JOB, **options
    )


RESULTS = {
    "max-batch": lambda: planner.max_batch(net, gpu_mib=2000, **JOB),
    "none-fits": lambda: planner.max_batch(net, gpu_mib=500, **JOB),
    "estimate": lambda: planner.estimate(net, 64, **JOB),
    "too-large": lambda: planner.estimate(net, 10**6, gpu_mib=2000, **JOB),
    "fits": lambda: planner.estimate(net, 8, gpu="RTX 4090", **JOB),
    "gpus": lambda: few_gpus(),
    "gpus-batch": lambda: few_gpus(batch=500_000),
    "explain": lambda: planner.explain(net, 64, **JOB),
    "advise": lambda: planner.advise(net, 40_000, gpu_mib=2000, **JOB),
    "advise-fits": lambda: planner.advise(net, 8, gpu_mib=2000, **JOB),
    "devices": lambda: DevicesResult(load_devices()),
    "device": lambda: DevicesResult((find_device("4090"), find_device("GH200"))),
    "no-device": lambda: DevicesResult(()),
}


def drawn(result: object, width: int = 400, **options: Any) -> str:
    """Return the text on a terminal of this width."""
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=width, highlight=False, markup=False, emoji=False, **options
    )
    console.print(result)
    return stream.getvalue()


def words(text: str) -> Counter[str]:
    """Every word and figure, without frames, bars, bullets, the colons behind names, and units."""
    plain_words = re.sub(r"\x1b\[[0-9;]*m", "", text).split()
    plain = (word.removesuffix(":").removesuffix(",") for word in plain_words)
    return Counter(word for word in plain if re.search(r"\w", word) and word != "MiB")


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.slow
def test_a_terminal_says_all_that_the_text_says(name: str) -> None:
    """Each word and figure of the plain report stands on the terminal, as often."""
    result = RESULTS[name]()
    assert words(drawn(result)) == words(str(result))


def test_no_colour() -> None:
    """With no colours the same tables stand there in bold and faint letters alone."""
    shown = drawn(planner.estimate(net, 64, **JOB), no_color=True, color_system="truecolor")
    codes = {code for match in re.findall(r"\x1b\[([0-9;]*)m", shown) for code in match.split(";")}
    assert codes == {"0", "1", "2"}


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_narrow_terminals(width: int) -> None:
    """No line is wider than the terminal."""
    shown = re.sub(r"\x1b\[[0-9;]*m", "", drawn(planner.explain(net, 64, **JOB), width))
    assert max(len(line) for line in shown.splitlines()) <= width


# ---- the command itself


def on_terminal(*arguments: str, **environment: str) -> str:
    """Return the output of a command on a terminal of 80 columns."""
    known = {"PATH": os.environ["PATH"], "COLUMNS": "80", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        os.execve(BIN / "planner", ["planner", *arguments], known | environment)
    shown = b""
    try:
        while piece := os.read(terminal, 65536):
            shown += piece
    except OSError:  # on Linux: the other side is gone
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return shown.decode().replace("\r\n", "\n")


def in_pipe(*arguments: str, **environment: str) -> str:
    command = [str(BIN / "planner"), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.slow
def test_nothing_is_cut_short(name: str, width: int) -> None:
    """No word ends in dots on any terminal; what has no room wraps, or its column goes and is named."""
    result = RESULTS[name]()
    shown = drawn(result, width, color_system=None)
    assert "…" not in shown
    if width >= 60 and name not in ("gpus", "gpus-batch", "devices"):  # whose columns may go
        short = Counter({word: n for word, n in words(str(result)).items() if len(word) <= 8})
        assert short - words(shown) == Counter()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_names_of_gpus_are_whole(width: int) -> None:
    """Each GPU has one line with its name and its batch; the columns that are left out are named."""
    cards = [find_device(name) for name in ("RTX PRO 6000", "RTX 2080 Ti", "T4", "A100 80GB")]
    result = planner.gpus(net, devices=cards, **JOB)
    lines = drawn(result, width, color_system=None).splitlines()
    heading = next(line for line in lines if line.startswith("GPU "))
    for fit in result.fits:
        (line,) = (line for line in lines if line.startswith(fit.budget.device.name))
        assert f" {fit.max_batch:,}" in line
    gone = [
        name
        for name in ("retrying", "process", "at most", "headroom", "total MiB", "how sure")
        if name not in heading
    ]
    names = " ".join(" ".join(lines).split()).partition(f"Left out in {width} columns: ")[2]
    assert names.startswith(", ".join(gone)) and bool(gone) == (width < 100)


def test_a_terminal_gets_tables_and_a_pipe_the_text() -> None:
    """A command draws on a terminal and prints plain text into a pipe, whatever the colours there."""
    result = DevicesResult((find_device("4090"),))
    assert "─" * 40 in on_terminal("devices", "4090")
    assert in_pipe("devices", "4090") == f"{result}\n"
    assert in_pipe("devices", "4090", FORCE_COLOR="1") == f"{result}\n"


def test_no_color_is_honoured(tmp_path: Path) -> None:
    """A verdict has its colour on a terminal, and with NO_COLOR in the environment none (no-color.org)."""
    trace = tmp_path / "net.trace"
    planner.estimate(net, 8, save_trace=trace, **JOB)
    command = ("estimate", "--trace", str(trace), "--batch", "8", "--gpu", "4090")
    coloured, plain = on_terminal(*command), on_terminal(*command, NO_COLOR="1")
    assert "\x1b[1;32m" in coloured
    assert set(re.findall(r"\x1b\[([0-9;]*)m", plain)) == {"0", "1", "2"}


@pytest.mark.parametrize(
    "environment",
    [{"TERM": "dumb"}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}],
    ids=["dumb", "ascii"],
)
def test_terminals_without_signs_get_the_text(environment: dict[str, str]) -> None:
    """A terminal that shows letters only gets the plain text."""
    assert on_terminal("devices", "4090", **environment) == f"{DevicesResult((find_device('4090'),))}\n"


def test_json_is_json_on_a_terminal() -> None:
    """--json is the same line everywhere."""
    assert on_terminal("devices", "4090", "--json") == in_pipe("devices", "4090", "--json")


def test_a_pipe_loads_no_rich() -> None:
    """Plain text needs no import of rich."""
    code = (
        "import sys; from planner.cli import run; run(['devices', '4090']); sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_progress_says_how_long_it_takes() -> None:
    """A line of progress that stands there for two seconds counts them."""
    assert progress_line("tracing batch 64", 1.9) == "tracing batch 64"
    assert progress_line("tracing batch 64", 12.2) == "tracing batch 64, 12 s"
