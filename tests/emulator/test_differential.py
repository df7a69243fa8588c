"""The static planner beside emulated runs of the same loop, event by event and byte by byte."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.emulated.both_sides import Emulator, cudnn_of, plan_statically
from planner.api.request.request import make_job
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from tests.helpers.structs import replace

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks.emulated.differential"


def test_fixed_jobs_are_identical_to_the_byte(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Every block of every fixed job is requested and freed alike, and both peaks are the same."""
    table = tmp_path / "rows.csv"
    python = str(request.config.getoption("--cuda-python"))
    command = [sys.executable, "-m", SCRIPT, "--fixed", "--python", python, "--to", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 5
    assert {row["model"]: row["cause"] + row["what"] + row["failure"] for row in rows} == {
        row["model"]: "identical" for row in rows
    }


@pytest.mark.parametrize(
    ("model", "size", "room_mib"),
    [("resnet18", 128, 265), ("resnet18", 128, 337), ("resnet18", 128, 345), ("vgg11", 64, 1188)],
)
def test_engines_after_a_refused_workspace(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, size: int, room_mib: int
) -> None:
    """Both sides take the same one of the next engines, or none, if memory is short for the first."""
    python = str(request.config.getoption("--cuda-python"))
    card = find_device("RTX 3060")
    room = replace(card.usable, value=room_mib * MIB + card.context.value)
    card = replace(card, usable=room)
    options = {"input": f"3x{size}x{size}", "cudnn": cudnn_of(python)}
    job, _, _ = make_job(f"torchvision:{model}", options)  # type: ignore[arg-type]
    emulator = Emulator(python, tmp_path)
    try:
        emulated, _ = emulator.run(job, 32, "RTX 3060", card)
    finally:
        emulator.close()
    planned, trace = plan_statically(job, 32, card)
    assert trace is not None and emulated.failure == ""
    assert (planned.allocated_bytes, planned.reserved_bytes, planned.oom) == (
        emulated.allocated_bytes,
        emulated.reserved_bytes,
        emulated.oom,
    )
    assert planned.retries > 0
