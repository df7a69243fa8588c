"""Run the cases of a published table, each in a process of its own, and write its figures as JSON.

The process that imported torch is forked before CUDA starts, so that a case begins as a fresh process does
without the seconds that the import takes. Runs in the emulated environment, without the planner.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Case = dict[str, Any]


def run_cases(run: Callable[[Case], Case]) -> None:
    """Run the cases of the first argument, a list in JSON; write the figures to the file of the second.

    Exits at the first case that fails.
    """
    for case in json.loads(sys.argv[1]):
        process = os.fork()
        if not process:
            _run_one(run, case)
        _, status = os.waitpid(process, 0)
        if status:
            raise SystemExit(f"failed: {json.dumps(case)}")
    torch.empty(1, device="cuda")  # `planner run` reports of the process that it started


def _run_one(run: Callable[[Case], Case], case: Case) -> None:
    code = 1
    try:
        figures = json.dumps(run(case))
        with Path(sys.argv[2]).open("a", encoding="utf-8") as file:
            file.write(f"{figures}\n")
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)
