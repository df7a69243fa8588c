"""`tables`, and plans by stored calibrations, on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import paths
from planner.hardware.calibration.files import TABLES_FOLDER, load_folders
from planner.hardware.calibration.model import Fit, Point
from planner.hardware.device import MIB
from planner.jobs import Job, Loss, TensorSpec
from planner.jobs.codec import job_to_json
from planner.program.events import Alloc, Category, Phase, PhaseStart, Site
from planner.program.program import AffineAlloc, Program
from tests.helpers.calibrations import FIT, JOB, KEY, REFUSAL, calibration, observation, save_calibration
from tests.helpers.command_line import Capture, outcome
from tests.helpers.structs import replace
from tests.helpers.traces import program_of, save_trace

TOY = Job.create("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=1)


def toy() -> Program:
    """100 MiB and 10 MiB a sample."""
    events = (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 100 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
        AffineAlloc(1, 0, 10 * MIB, Category.ACTIVATION, 0),
        PhaseStart(1, Phase.END),
    )
    return program_of(events, (Site("fc", "to"),))


def store(folder: Path, overhead_mib: int) -> None:
    """A calibration of the toy job on an RTX 3060 12GB."""
    key = replace(KEY, job=TOY, gpu="RTX 3060 12GB")
    save_calibration(folder, calibration(key, replace(FIT, overhead_bytes=overhead_mib * MIB)))


def overhead(options: str, tmp_path: Path, capsys: Capture) -> float | None:
    """The overhead that `estimate` corrects by."""
    path = tmp_path / "toy.trace"
    save_trace(toy(), path, {"job": job_to_json(TOY), "batch": 5, "capability": [8, 6]})
    command = f"estimate --trace {path} --gpu RTX3060-12GB --json {options}"
    code, out, err = outcome(command, capsys)
    assert (code, err) == (0, "")
    fields = json.loads(out)["calibration"]
    return None if fields is None else float(fields["overhead_mib"])


def test_which_folder_answers(tmp_path: Path, own: Path, capsys: Capture) -> None:
    """The folders that are given come first, in their order, then the user's own; --no-calibration takes
    none.
    """
    assert overhead("", tmp_path, capsys) is None
    store(own, 700)
    assert overhead("", tmp_path, capsys) == 700
    store(tmp_path / "a", 800)
    store(tmp_path / "b", 900)
    given = f"--calibrations {tmp_path / 'b'} --calibrations {tmp_path / 'a'}"
    assert overhead(given, tmp_path, capsys) == 900
    assert overhead("--no-calibration", tmp_path, capsys) is None


def test_max_batch_reads_calibrations(tmp_path: Path, capsys: Capture) -> None:
    """More overhead leaves less for the batch: 10 MiB a sample, so 1,000 MiB are about 100 samples."""
    path = tmp_path / "toy.trace"
    save_trace(toy(), path, {"job": job_to_json(TOY), "batch": 5, "capability": [8, 6]})
    batches = []
    for name, size in (("a", 700), ("b", 1_700)):
        store(tmp_path / name, size)
        command = f"max-batch --trace {path} --gpu RTX3060-12GB --json --calibrations {tmp_path / name}"
        batches.append(json.loads(outcome(command, capsys)[1])["max_batch"])
    assert batches[0] - batches[1] in (97, 98, 99)  # by the slope of 1.02


def test_tables_that_ship(capsys: Capture) -> None:
    """Every shipped file is listed, with its line or the reason for none, in at most 100 columns."""
    code, out, err = outcome("tables", capsys)
    stored = load_folders([TABLES_FOLDER])
    assert (code, err) == (0, "")
    assert out.startswith(f"{len(stored)} calibrations in ")
    assert out.count("refused: ") == sum(not isinstance(one.fit, Fit) for one in stored)
    assert out.count("  Line ") == len(stored)
    assert max(map(len, out.splitlines())) <= 100


def test_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Without any calibration the answer names the folder that was searched, with code 0."""
    monkeypatch.setattr("planner.hardware.calibration.files.TABLES_FOLDER", tmp_path)
    code, out, _ = outcome("tables", capsys)
    assert code == 0
    assert " ".join(out.split()) == f"No calibration is stored. Looked into: {tmp_path}"


def test_tables_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A calibration in full: origin, versions, line, and each run with its distance from the line."""
    monkeypatch.setattr("planner.hardware.calibration.files.TABLES_FOLDER", tmp_path)
    died = replace(observation(30, 2_000), oom=True)
    held = replace(observation(40, 2_000), retries=1)
    known = calibration()
    more = (*known.points, Point(died, 3_000 * MIB), Point(held, 3_000 * MIB))
    save_calibration(tmp_path, replace(known, points=more, when="someday"))
    assert outcome("tables", capsys)[1].partition("\n\n")[2] == TABLE


TABLE = """\
torchvision:resnet18 with sgd on NVIDIA GeForce RTX 3060, torch 2.6.0+cu124, measured
  Job       toy = torchvision:resnet18(depth=[1, 2], rate=0.5, bias=true); training with sgd,
            cross_entropy loss; one sample: input 3x8x8, target scalar:int64
  From      measured on someday; made up
  Versions  torch 2.6.0+cu124, CUDA 12.4, cuDNN 9.1.0, driver not recorded, compute capability 8.6;
            traced with torch 2.13.0
  Line      500.0 MiB + 1.0200 x replayed peak reserved, with the context; spread 10.0 MiB, 5
            points, highest leverage 0.60, off the line: batch 16
       batch    replayed    measured      fitted    residual  MiB
          10     1,000.0     1,500.0     1,520.0       -20.0
          20     2,000.0     2,520.0     2,540.0       -20.0
          30     3,000.0     2,000.0     3,560.0           -  out of memory
          40     3,000.0     2,000.0     3,560.0           -  not fitted: it was bounded
"""


def test_tables_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Scripts get the same: a refusal has its reason and no line, and its runs no residuals."""
    monkeypatch.setattr("planner.hardware.calibration.files.TABLES_FOLDER", tmp_path)
    save_calibration(tmp_path, calibration(fit=REFUSAL))
    fields = json.loads(outcome("tables --json", capsys)[1])
    (table,) = fields["calibrations"]
    assert (fields["schema"], fields["folders"], table["folder"]) == (1, [str(tmp_path)], str(tmp_path))
    assert (table["fit"], table["refused"], table["gpu"]) == (None, "3 batch sizes", KEY.gpu)
    assert (table["job"], table["versions"]["capability"]) == (job_to_json(JOB), [8, 6])
    assert table["age_days"] >= 0
    assert table["runs"][0] == {
        "batch": 10,
        "replayed_mib": 1_000.0,
        "measured_mib": 1_500.0,
        "emulated_mib": None,
        "fitted_mib": None,
        "residual_mib": None,
        "oom": False,
        "used": False,
    }


def test_a_broken_table(tmp_path: Path, capsys: Capture) -> None:
    """A broken file is one line and code 4."""
    (tmp_path / "x.yaml").write_text("kind: [")
    code, out, err = outcome(f"tables --calibrations {tmp_path}", capsys)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert err.startswith(f"planner: {tmp_path / 'x.yaml'}")


def test_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$XDG_DATA_HOME counts if it is absolute, else ~/.local/share; without a home there is none."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.own_folder() == tmp_path / ".local/share/gpu-batch-planner/calibrations"

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert paths.own_folder() is None


def test_planning_imports_nothing_that_measures() -> None:
    """The commands that plan start without the package that measures."""
    code = "import sys, planner.cli.parser; print([m for m in sys.modules if m.startswith('calibration')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_ones_own_folder_is_in_nobodys_way(own: Path, capsys: Capture) -> None:
    """The user's own folder is not read for questions that calibrations cannot answer."""
    store(own, 700)
    (own / "broken.yaml").write_text("kind: [")
    for command in ("estimate --model cnn --method formula", "estimate --model cnn"):
        code, _, err = outcome(command, capsys)
        assert (code, err) == (0, "")
    code, _, err = outcome("estimate --model cnn --gpu L4", capsys)
    assert (code, err.startswith(f"planner: {own / 'broken.yaml'}")) == (4, True)


def test_compare_reads_calibrations(tmp_path: Path, capsys: Capture) -> None:
    """A stored run of the very job at this batch is what the figures are held against; the line corrects."""
    job = Job.create("zoo:ConvPair", inputs=(TensorSpec((1, 256, 256)),), loss=Loss.SUM)
    key = replace(KEY, job=job, gpu="RTX 3060 12GB")
    seen = replace(observation(10, 1_500, key), peak_allocated_bytes=1_000 * MIB)
    save_calibration(tmp_path, replace(calibration(key), points=(Point(seen, 1_100 * MIB),)))
    command = "compare --model zoo:ConvPair --input 1x256x256 --loss sum --gpu RTX3060-12GB --batch 10 --json"
    code, out, err = outcome(f"{command} --calibrations {tmp_path}", capsys)
    fields = json.loads(out)
    assert (code, err, fields["unmeasured"]) == (0, "", None)
    assert fields["measured"] == {
        "printed_mib": 1_000.0,
        "kept_mib": {},
        "allocated_mib": 1_000.0,
        "reserved_mib": 1_150.0,
        "process_mib": 1_500.0,
        "source": "measured on 2026-01-02, torch 2.6.0+cu124, CUDA 12.4; GPU RTX 3060 12GB",
    }
    rows = {row["estimator"]: row for row in fields["rows"]}
    reserved, process = rows["reserved"], rows["process"]
    assert (reserved["against_mib"], process["against_mib"]) == (1_150.0, 1_500.0)
    assert process["mib"] == pytest.approx(500 + 1.02 * reserved["mib"], abs=0.01)  # the line of `FIT`
    code, out, _ = outcome(f"{command} --no-calibration", capsys)
    assert (code, json.loads(out)["measured"]) == (0, None)
