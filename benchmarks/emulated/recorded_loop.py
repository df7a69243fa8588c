"""Run jobs of benchmarks/accuracy/recorded_jobs one after another, and dump what torch records of each.

Run by benchmarks/accuracy/recorded_emulated.py on an emulated GPU. The recording begins before the first
tensor, or with the last step, as in the record that the job is held against.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from cases import Case, run_cases

MOST_ENTRIES = 1_000_000  # of torch's record


def run(case: Case) -> Case:
    """Run the jobs of one process."""
    _leave_weights_as_they_are()
    os.environ["PLANNER_EMULATED_ADDRESSES"] = case["addresses"]  # read for each segment
    for job in case["jobs"]:
        _run_job(job)
    return {"torch": torch.__version__}


def _run_job(job: Case) -> None:
    """Run one job, whose model and names end with it."""
    if not job["starts_with_step"]:
        _record()
    loop = _class_of(Path(job["file"]), job["name"])(**job["arguments"])
    for step in range(1, job["steps"] + 1):
        inputs = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in job["inputs"]]
        if step == job["starts_with_step"]:
            _record()
        loop.step(*inputs)
    torch.cuda.memory._dump_snapshot(job["snapshot"])
    torch.cuda.memory._record_memory_history(enabled=None)


def _record() -> None:
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)


def _class_of(file: Path, name: str) -> Any:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _leave_weights_as_they_are() -> None:
    """Draw no weights on the CPU: billions take minutes, and no allocation depends on values."""
    draw = torch.nn.init.trunc_normal_

    def draw_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
        return draw(tensor) if tensor.is_cuda else tensor

    torch.nn.init.trunc_normal_ = draw_on_gpu


if __name__ == "__main__":
    run_cases(run)
