"""`planner explain` as people and scripts meet it."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.allocator.history.file import save_history
from planner.allocator.history.history import History, HistoryEvent
from planner.store.file_store import open_saved
from tests.helpers.command_line import Capture, outcome

ROOT = Path(__file__).parents[2]
MIB = 2**20
MODELS = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        print("chatter of the model")
        features = self.body(x)
        pooled = features.mean((2, 3))
        return self.head(pooled)


class TrainsOnly(Net):
    def forward(self, x):
        if not self.training:
            raise RuntimeError("only trains")
        return self.head(self.body(x).mean((2, 3)))
"""
NET = "--model models.py:Net --input 3x64x64 --loss sum --optimizer adam"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file models.py."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explained(command: str, capsys: Capture) -> dict[str, Any]:
    code, out, _ = outcome(f"{command} --json", capsys)
    assert code == 0
    fields = json.loads(out)
    assert isinstance(fields, dict)
    return fields


def sums(module: dict[str, Any]) -> bool:
    inside = [child["size_bytes"] for child in module["children"]]
    whole = module["own_bytes"] + sum(inside) == module["size_bytes"] == sum(module["by_category"].values())
    return whole and all(map(sums, module["children"]))


def test_the_text_has_every_section(capsys: Capture) -> None:
    """Peak, categories, modules, tensors with the user's own lines, gaps, steps and evaluation."""
    code, out, err = outcome(f"explain {NET} --batch 16", capsys)
    assert (code, err) == (0, "chatter of the model\n" * 6)
    assert out.startswith("Batch 16 takes ")
    for text in (
        "\nPeak allocated: ",
        "\nThe process consists of ",
        "\nBy module at the peak ",
        "\n  body  ",
        "\n    0  ",
        "\nLargest of the ",
        "activations  16x8x64x64 float32  convolution in body.0, step ",
        "models.py:13  features = self.body(x)\n",
        "\nAt the reserved peak ",
        "\n  free segments ",
        "\nHighest levels ",
        "\n  step 3 ",
        "\n  evaluation alone ",
        "\nAssumed\n",
    ):
        assert text in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_json_adds_up(capsys: Capture) -> None:
    """Categories and modules are the allocated peak to the byte, and agree with the estimate inside."""
    fields = explained(f"explain {NET} --batch 16 --top 3", capsys)
    peak = fields["peak"]["allocated_bytes"]
    assert round(peak / MIB, 3) == fields["estimate"]["peak_allocated_mib"]
    assert sum(fields["categories"].values()) == fields["modules"]["size_bytes"] == peak
    assert fields["modules"]["by_category"] == fields["categories"]
    assert sums(fields["modules"])
    gaps = fields["fragmentation"]
    parts = gaps["allocated_bytes"] + gaps["gap_bytes"] + gaps["free_segment_bytes"]
    assert parts == gaps["reserved_bytes"]
    assert round(gaps["reserved_bytes"] / MIB, 3) == fields["estimate"]["peak_reserved_mib"]
    assert [step["step"] for step in fields["steps"]] == [0, 1, 2, 3]
    assert 0 < fields["evaluation"]["peak_allocated_bytes"] < peak
    assert len(fields["tensors"]) == 3 < fields["blocks"]
    assert fields["difference"] is None


def test_a_tensor_in_json(capsys: Capture) -> None:
    """Size, category, place, shape, dtype, and the line of the user's code with its text."""
    fields = explained(f"explain {NET} --batch 16 --top 40", capsys)
    (conv,) = [
        tensor
        for tensor in fields["tensors"]
        if (tensor["op"], tensor["dtype"]) == ("aten.convolution.default", "float32")
    ]
    assert conv == {
        "size_bytes": 2 * MIB,
        "requested_bytes": 2 * MIB,
        "category": "activations",
        "module": "body.0",
        "op": "aten.convolution.default",
        "step": fields["peak"]["step"],
        "phase": "forward",
        "shape": [16, 8, 64, 64],
        "dtype": "float32",
        "source": "models.py:13",
        "code": "features = self.body(x)",
    }


@pytest.mark.parametrize(("depth", "names"), [(1, []), (2, ["body.0", "body.1"])])
def test_depth_folds_modules(depth: int, names: list[str], capsys: Capture) -> None:
    """`--depth` limits the levels of modules in the text."""
    fields = explained(f"explain {NET} --batch 16 --depth {depth}", capsys)
    (body,) = [child for child in fields["modules"]["children"] if child["name"] == "body"]
    assert sorted(child["name"] for child in body["children"])[:2] == names


def test_a_batch_that_does_not_fit_is_explained(capsys: Capture) -> None:
    """The answer names the failing request and the memory of a GPU without end, with code 0."""
    code, out, _ = outcome(f"explain {NET} --batch 4096 --allocator-cap-mib 1000", capsys)
    assert code == 0
    assert out.startswith("Batch 4096 does not fit; without a limit it would take ")
    assert "\nFails at:       step 1, forward pass, module body.1, native_batch_norm: no room for " in out
    assert ", on an unlimited GPU The process consists of" in " ".join(out.split())


def test_a_model_that_only_trains_has_no_evaluation(capsys: Capture) -> None:
    """Training is explained also if eval mode fails."""
    command = "explain --model models.py:TrainsOnly --input 3x64x64 --loss sum --batch 2"
    assert explained(command, capsys)["evaluation"] is None


def test_inference_is_explained_without_an_evaluation(capsys: Capture) -> None:
    """A job of inference has no evaluation beside it."""
    fields = explained(f"explain {NET} --batch 16 --mode infer", capsys)
    assert fields["evaluation"] is None
    assert fields["categories"]["gradients"] == 0


def test_the_picture_and_the_snapshot_are_written(folder: Path, capsys: Capture) -> None:
    """`--plot` and `--snapshot` write files beside the answer."""
    code, out, _ = outcome(f"explain {NET} --batch 16 --plot x.png --snapshot x.pickle", capsys)
    assert (code, out[:9]) == (0, "Batch 16 ")
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")
    snapshot = pickle.loads((folder / "x.pickle").read_bytes())
    lines = {frame["filename"] for entry in snapshot["device_traces"][0] for frame in entry["frames"]}
    assert {"body.0", "body", "models.py", "training loop"} <= lines


def test_against_its_own_snapshot_nothing_differs(capsys: Capture) -> None:
    """A snapshot written by one call and read by the next is the same run."""
    outcome(f"explain {NET} --batch 16 --snapshot x.pickle", capsys)
    fields = explained(f"explain {NET} --batch 16 --against x.pickle", capsys)["difference"]
    assert fields["same"]
    assert fields["matched"] == fields["traced"]["blocks"] == fields["recorded"]["blocks"] > 0
    _, out, _ = outcome(f"explain {NET} --batch 16 --against x.pickle", capsys)
    assert "\nTrace and recording are the same, block by block\n" in out


def test_against_names_the_workspace_of_an_operator(folder: Path, capsys: Capture) -> None:
    """Memory that cuDNN takes within a convolution is listed with its operator, module and size."""
    outcome(f"explain {NET} --batch 16 --steps 1 --cudnn published --snapshot x.pickle", capsys)
    (entries,) = pickle.loads((folder / "x.pickle").read_bytes())["device_traces"]
    events: list[HistoryEvent] = []
    for entry in entries:
        if entry["action"] in ("alloc", "free_completed"):
            events.append(HistoryEvent(entry["action"], entry["addr"], entry["size"]))
            if entry["frames"] and entry["frames"][0]["name"] == "aten.convolution.default":
                events += [HistoryEvent(action, 2**40, 7 * MIB) for action in ("alloc", "free_completed")]
    save_history(History("Some GPU", "2.13.0", "", None, None, tuple(events)), folder / "x.json.gz")
    command = f"explain {NET} --batch 16 --steps 1 --cudnn published --against x.json.gz"
    fields = explained(command, capsys)["difference"]
    assert fields["only_one_side"] == [
        {
            "kind": "workspace",
            "phase": "forward",
            "module": "body.0",
            "op": "aten.convolution.default",
            "size_bytes": 7 * MIB,
            "where": "",
            "steps": [1],
        }
    ]
    assert [row["recorded_only_bytes"] for row in fields["ops"] if row["recorded_only"]] == [7 * MIB]
    assert fields["other_lives"] == []


def test_a_saved_trace_is_explained_without_torch(toy_trace: Path) -> None:
    """`--trace` needs no torch, and shows neither lines nor an evaluation."""
    code = (
        "import sys; from planner.cli import run; code = run(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", "--trace", str(toy_trace), "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    fields = json.loads(done.stdout)
    assert fields["peak"]["allocated_bytes"] == 13 * MIB
    assert fields["evaluation"] is None
    assert fields["tensors"][0]["shape"] is None


def test_a_trace_is_saved_for_all_batches(folder: Path, capsys: Capture) -> None:
    """`--save-trace` writes what `estimate` writes, for any batch size where there is a loop."""
    code, _, _ = outcome(f"explain {NET} --batch 16 --save-trace x.trace", capsys)
    assert code == 0
    assert open_saved(folder / "x.trace").covers_batches


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--top 0", 2, "--top: '0' is refused; use a whole number from 1 to 1000000"),
        ("--depth x", 2, "--depth: expected a whole number, got 'x'"),
        ("--plot x.gif", 2, "--plot x.gif: give a file that ends in .png, .svg or .pdf"),
        ("--against none", 4, "none: cannot read the history: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(
    options: str, code: int, message: str, toy_trace: Path, capsys: Capture
) -> None:
    """Wrong options and files that cannot be used are one line, with the exit code of their kind."""
    assert outcome(f"explain --trace {toy_trace} {options}", capsys) == (code, "", f"planner: {message}\n")
