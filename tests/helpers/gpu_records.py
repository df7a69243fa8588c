"""The folder of histories that real GPUs recorded, and the mark of tests that need it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("PLANNER_HISTORIES", ROOT.parent / "shared" / "truth" / "histories"))
IS_THERE = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason=f"no histories of real GPUs at {FOLDER}; set PLANNER_HISTORIES to their folder",
)
