"""`calibrate` on the command line, with a GPU whose runs a trace answers."""

import json
from pathlib import Path

import pytest

from planner.hardware.calibration.files import load_folders
from tests.helpers.calibrating import JOB_OPTIONS
from tests.helpers.command_line import Capture, outcome
from tests.helpers.runs import CARD, FakeMeasure


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("tables --calibrations missing", "--calibrations missing: no such folder; make it or remove"),
        (
            "estimate --model m --calibrations . --no-calibration",
            "--calibrations and --no-calibration exclude each other",
        ),
        ("calibrate", "nothing to measure: give one of --model NAME, --campaign FILE and --import DIR"),
        ("calibrate --model m --campaign standard", "--model and --campaign: give one of --model NAME"),
        ("calibrate --campaign standard --loss mse", "--loss and --campaign: the latter defines what is run"),
        ("calibrate --import . --batches 8", "--batches and --import: the latter defines what is run"),
        ("calibrate --import missing", "--import missing: no such folder"),
        (
            "calibrate --import . --minutes 5",
            "--minutes and --import: records are taken over without measuring",
        ),
        ("calibrate --import . --alloc-conf x", "--alloc-conf and --import: the latter defines what is run"),
        (
            "calibrate --campaign standard --cudnn-benchmark",
            "--cudnn-benchmark and --campaign: the latter defines what is run; leave one",
        ),
        (
            "calibrate --campaign standard --no-grad-scaler",
            "--grad-scaler and --campaign: the latter defines what is run; leave one",
        ),
        ("calibrate --model resnet50 --batches 8 --alloc-conf x", "allocator configuration: cannot read 'x'"),
        (
            "estimate --model cnn --method formula --calibrations .",
            "--calibrations and --method formula: the closed formula takes no account of it; remove it",
        ),
        (
            "estimate --model cnn --calibrations .",
            "--calibrations: calibrations are of one GPU; say which, such as --gpu L4",
        ),
        (
            "max-batch --model cnn --allocator-cap-mib 900 --calibrations .",
            "--calibrations: calibrations are of one GPU; say which, such as --gpu L4",
        ),
        ("compare --model cnn --calibrations .", "--calibrations: calibrations are of one GPU"),
        ("calibrate --model resnet50", "--batches is missing: give at least four batch sizes"),
        ("calibrate --model resnet50 --batches 8,x", "--batches: expected a whole number, got 'x'"),
        ("calibrate --model resnet50 --batches 8,0", "--batches: '0' is refused; use a whole number"),
        ("calibrate --model resnet50 --batches 8 --minutes x", "--minutes: expected a number, got 'x'"),
        ("calibrate --model resnet50 --batches 8 --minutes -1", "--minutes -1.0: give the minutes"),
        (
            "calibrate --model resnet50 --batches 8 --trace f",
            "--trace: calibrate runs the model itself; remove it",
        ),
        ("verify --trace f", "--trace: verify runs the model itself; remove it"),
    ],
)
def test_wrong_usage(command: str, line: str, tmp_path: Path, capsys: Capture) -> None:
    """Wrong usage is one line and code 2, before a search for a GPU."""
    code, out, err = outcome(command, capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"planner: {line}") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "calibrate --model resnet50 --batches 8,16,32,64",
        "calibrate --campaign standard",
        "verify --model resnet50 --batch 8",
    ],
)
def test_without_a_gpu(command: str, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Measuring without a GPU is one line and code 5, and leaves no folder behind."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = outcome(command, capsys)
    assert (code, out, err.count("\n"), own.exists()) == (5, "", 1, False)
    assert err.startswith("planner: no NVIDIA GPU is usable here: ")


def test_calibrate(own: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """Four batches become a line in the user's own folder: the context's 420 MiB; again, nothing runs."""
    command = "calibrate --model torchvision:resnet18 --batches 8,16,32,64 --json"
    code, out, err = outcome(command, capsys)
    assert (code, err, len(gpu.requests)) == (0, "", 4)
    fields = json.loads(out)
    assert (fields["folder"], fields["new_runs"], fields["series_left"], fields["failures"]) == (
        *(str(own), 4, 0, []),
    )
    (table,) = fields["calibrations"]
    assert table["fit"]["overhead_mib"] == pytest.approx(420, abs=30)  # segments of 20 MiB
    assert [one.key.job.model.name for one in load_folders([own])] == ["torchvision:resnet18"]
    code, out, _ = outcome(command.removesuffix(" --json"), capsys)
    assert (code, len(gpu.requests)) == (0, 4)
    assert " ".join(out.split()).startswith(f"0 new runs, saved in {own}")
    assert "x replayed peak reserved, with the context; spread" in " ".join(out.split())


def test_calibrate_without_a_line(tmp_path: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """Two batches make no line: the runs are stored, the reason is printed, and the code is 1."""
    command = f"calibrate --model torchvision:resnet18 --batches 8,16 --out {tmp_path}"
    code, out, _ = outcome(command, capsys)
    assert code == 1
    assert "refused: 2 batch sizes with a peak of their own, at least 4 are needed" in " ".join(out.split())
    assert len(load_folders([tmp_path])) == 1


def test_calibrate_a_campaign(tmp_path: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """A campaign file is run in place of a model, and its limits are printed."""
    path = tmp_path / "campaign.yaml"
    path.write_text(
        "about: a test\ngroups:\n"
        "  - {about: a cap, models: ['torchvision:resnet18'], batches: [8], caps_mib: [500]}\n"
    )
    code, out, _ = outcome(f"calibrate --campaign {path} --out {tmp_path}", capsys)
    assert code == 0
    assert "Largest batch 40: torchvision:resnet18 with sgd under 500 MiB" in out


@pytest.mark.usefixtures("linear", "emulated")
def test_an_emulated_calibration_is_called_that(tmp_path: Path, capsys: Capture) -> None:
    """Its title, its origin, the column of its runs and the files name it as emulated."""
    command = f"calibrate --model models.py:Fine {JOB_OPTIONS} --batches 8,16,32,64 --out {tmp_path / 'new'}"
    code, out, _ = outcome(command, capsys)
    assert f"on NVIDIA RTX 3060 12GB (emulated), torch {CARD.versions.torch}, emulated" in out
    assert "From      emulated on " in out and "replayed    emulated      fitted" in out
    assert "measured" not in out
    (run, *_) = json.loads(outcome(f"{command} --json", capsys)[1])["calibrations"][0]["runs"]
    assert (run["measured_mib"], run["emulated_mib"] > 0) == (None, True)


@pytest.mark.parametrize("options", ["", "--cudnn-benchmark", "--alloc-conf expandable_segments:True"])
def test_calibrate_under_settings(options: str, tmp_path: Path, gpu: FakeMeasure, capsys: Capture) -> None:
    """The allocator's options and cuDNN's benchmark mode are those of the runs and of the calibration."""
    command = f"calibrate --model torchvision:resnet18 --batches 8,16,32,64 --out {tmp_path} {options}"
    assert outcome(command, capsys)[0] == 0
    conf = "expandable_segments:True" if "alloc" in options else ""
    expected = {("cudnn" in options, conf)}
    assert {
        (request.job.environment.cudnn_benchmark, request.alloc_conf) for request in gpu.requests
    } == expected
    (stored,) = load_folders([tmp_path])
    assert {(stored.key.job.environment.cudnn_benchmark, stored.key.settings.alloc_conf)} == expected
