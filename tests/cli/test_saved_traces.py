"""Saved traces on the command line: planned as they were, for any batch, without torch."""

import json
from pathlib import Path

import pytest

from planner.program.events import Site, Trace
from tests.helpers.command_line import MIB, Capture, outcome, python, saved, toy_events, without_seconds
from tests.helpers.traces import program_of


def test_saved_trace_plans_alike(capsys: Capture, tmp_path: Path) -> None:
    """A plan from a saved trace is the plan that was made when it was saved, up to the first failure."""
    path = tmp_path / "conv_pair.trace"
    _, first, _ = outcome(f"max-batch --model conv_pair --gpu-mib 2000 --json --save-trace {path}", capsys)
    code, second, _ = outcome(f"max-batch --trace {path} --gpu-mib 2000 --json", capsys)
    assert code == 0
    assert without_seconds(json.loads(second)) == without_seconds(json.loads(first))


def test_saved_estimate_plans_any_batch(capsys: Capture, tmp_path: Path) -> None:
    """A trace saved by `estimate` holds for its own batch size by default, and for every other."""
    path = tmp_path / "cnn.trace"
    _, first, _ = outcome(f"estimate --model cnn --batch 7 --json --save-trace {path}", capsys)
    _, again, _ = outcome(f"estimate --trace {path} --json", capsys)
    assert without_seconds(json.loads(again)) == without_seconds(json.loads(first))
    _, other, _ = outcome(f"estimate --trace {path} --batch 128 --json", capsys)
    assert round(json.loads(other)["peak_reserved_mib"], 1) == 604.0


def test_trace_plans_without_torch(toy_trace: Path) -> None:
    """A saved trace plans in a Python that has no torch, no numpy and no torchvision."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'torchvision', 'numpy', 'scipy'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from planner.cli import main\n"
        "main()\n"
    )
    card = ("--allocator-cap-mib", "300", "--confidence", "0.5")  # at even odds a cap counts in full
    done = python("-c", code, "max-batch", "--trace", str(toy_trace), *card, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "toy"
    assert json.loads(done.stdout)["max_batch"] == 140


def test_trace_of_one_batch(capsys: Capture, tmp_path: Path) -> None:
    """A trace that holds for one batch size is refused for others, and for a search."""
    trace = Trace(toy_events(0, 10 * MIB), (Site("fc", "to"),), 5)
    path = saved(tmp_path / "one.trace", trace)
    assert outcome(f"estimate --trace {path}", capsys)[0] == 0
    for command in (f"estimate --trace {path} --batch 2", f"max-batch --trace {path} --gpu-mib 8000"):
        assert outcome(command, capsys) == (
            2,
            "",
            f"planner: {path}: this trace holds for batch 5 only; capture batch 2 again\n",
        )


def test_trace_for_other_capability(capsys: Capture, toy_trace: Path) -> None:
    """A trace for another compute capability is noted in the answer."""
    note = "traced for compute capability 8.6; this GPU's kernels may take other memory"
    _, out, _ = outcome(f"estimate --trace {toy_trace} --gpu h200 --json", capsys)
    assert note in json.loads(out)["assumptions"]
    _, out, _ = outcome(f"estimate --trace {toy_trace} --gpu-mib 8000 --json", capsys)
    assert note not in json.loads(out)["assumptions"]


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"job": {}}, "KeyError: 'model'"),
        ({"job": None}, "TypeError: 'NoneType' object is not subscriptable"),
        ({"batch": "5"}, "TypeError: batch, capability and multiprocessors are integers"),
        ({"capability": [8]}, "ValueError: not enough values to unpack (expected 2, got 1)"),
    ],
)
def test_trace_with_broken_job(
    capsys: Capture, tmp_path: Path, about: dict[str, object], problem: str
) -> None:
    """A trace whose job is nonsense is a broken data file."""
    path = saved(tmp_path / "bad.trace", program_of(toy_events(MIB), (Site("fc", "to"),)), **about)
    assert outcome(f"estimate --trace {path}", capsys) == (
        4,
        "",
        f"planner: {path}: broken job of a trace: {problem}; capture it again\n",
    )
