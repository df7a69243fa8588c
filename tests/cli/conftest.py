"""Surroundings of command lines: files of models, the user's calibrations, a GPU that follows a formula."""

from pathlib import Path

import pytest

from tests.helpers.calibrating import tracer
from tests.helpers.command_line import MODELS
from tests.helpers.runs import CARD, FakeMeasure
from tests.helpers.structs import replace


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file models.py in the working directory."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder of calibrations, which is not there yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "gpu-batch-planner" / "calibrations"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeMeasure:
    """An RTX 3060 on which runs follow a formula, and traces that follow the same."""
    measure = FakeMeasure()
    monkeypatch.setattr("calibration.calibrate.find_gpu", lambda: CARD)
    monkeypatch.setattr("calibration.calibrate.measure", measure)
    monkeypatch.setattr("calibration.calibrate.open_traces", tracer)
    monkeypatch.setattr("calibration.probe.client.find_gpu", lambda: CARD)
    monkeypatch.setattr("calibration.probe.client.measure", measure)
    return measure


@pytest.fixture
def linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of nearly no memory."""
    (tmp_path / "models.py").write_text(
        "from torch import nn\n\n\nclass Fine(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(4, 4)\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def emulated(gpu: FakeMeasure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's GPU is an emulated one."""
    gpu.name = "NVIDIA RTX 3060 12GB (emulated)"
    card = lambda: replace(CARD, name=gpu.name)  # noqa: E731
    monkeypatch.setattr("calibration.calibrate.find_gpu", card)
    monkeypatch.setattr("calibration.probe.client.find_gpu", card)
