"""`planner report`: shown before it is written, and checked."""

import json
from pathlib import Path

import pytest

from calibration.observations import observation_path, save_observation
from tests.helpers.calibrations import KEY, plausible, save_calibration
from tests.helpers.command_line import outcome
from tests.helpers.structs import replace

Capture = pytest.CaptureFixture[str]


def test_nothing_is_written_unasked(tmp_path: Path, capsys: Capture) -> None:
    """Without a terminal to ask and without --yes, the file is shown and not written, exit code 2."""
    path, out = save_calibration(tmp_path, plausible()), tmp_path / "out"
    code, text, error = outcome(f"report {path} --out {out}", capsys)
    assert (code, text) == (2, "")
    assert "source: contributed" in error and "nobody can be asked here" in error.splitlines()[-1]
    assert not out.exists()


def test_packing_and_checking(tmp_path: Path, capsys: Capture) -> None:
    """What --yes writes passes --check; a file that was changed does not, exit code 1."""
    path, out = save_calibration(tmp_path, plausible()), tmp_path / "out"
    code, text, error = outcome(f"report {path} --out {out} --yes --json", capsys)
    (written,) = json.loads(text)["written"]
    assert (code, error) == (0, "")
    assert Path(written).read_text(encoding="utf-8") == json.loads(text)["packed"][0]
    assert outcome(f"report --check {written}", capsys)[:2] == (0, "1 file: nothing is wrong\n")
    other = Path(written).with_name("other.yaml")
    Path(written).rename(other)
    code, text, _ = outcome(f"report --check {other}", capsys)
    assert code == 1 and text.startswith("1 file: 1 problem\n")


def test_an_observation_stands_for_its_calibration(tmp_path: Path, capsys: Capture) -> None:
    """A run of a guard is found in the calibration of the folder above."""
    known = plausible()
    save_calibration(tmp_path, known)
    run = known.points[0].observation
    path = observation_path(tmp_path / "runs", run)
    save_observation(run, path)
    code, text, _ = outcome(f"report {path} --out {tmp_path / 'out'} --yes --json", capsys)
    assert code == 0 and len(json.loads(text)["written"]) == 1


def test_an_emulated_run_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """Its file says that it is emulated, and nothing is written."""
    gpu = f"{KEY.gpu} (emulated)"
    run = replace(plausible().points[0].observation, gpu=gpu, source="emulated")
    path = observation_path(tmp_path / "runs", run)
    save_observation(run, path)
    code, text, error = outcome(f"report {path} --out {tmp_path / 'out'} --yes", capsys)
    assert (code, text) == (2, "")
    assert error == (
        f"planner: {path}: an emulated run; only what was measured on a real GPU is contributed\n"
    )


def test_wrong_usage(capsys: Capture) -> None:
    """Each refusal says what to do."""
    assert outcome("report", capsys)[0] == 2
    assert outcome("report --check a.yaml --yes", capsys)[2].startswith("planner: --check writes nothing")
