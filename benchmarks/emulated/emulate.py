"""Run one of the loops beside this file on emulated GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Case = dict[str, Any]


def emulate(python: str, gpu: str, loop: str, cases: list[Case]) -> list[Case]:
    """Return the loop's figures for each case, run by this Python on this GPU.

    Raises SystemExit with the end of its output if a case fails. PLANNER_EMULATED_ADDRESSES is
    passed on.
    """
    with TemporaryDirectory() as folder:
        figures = Path(folder) / "figures"
        command = [python, str(Path(__file__).with_name(loop)), json.dumps(cases), str(figures)]
        planner = [sys.executable, "-m", "planner", "run", "--gpu", gpu, "--json", "--", *command]
        done = subprocess.run(planner, env=os.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{loop} on {gpu}: {done.stderr[-2000:]}")
        return [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
