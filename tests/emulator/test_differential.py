"""The static planner beside emulated runs of the same loop, event by event and byte by byte."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

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
