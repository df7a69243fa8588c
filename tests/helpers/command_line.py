"""Command lines in this process or a fresh one, and a trace small enough to plan by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import run
from planner.jobs import Job, Loss, TensorSpec
from planner.jobs.codec import job_to_json
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Trace
from planner.program.program import AffineAlloc, Program
from tests.helpers.traces import save_trace

ROOT = Path(__file__).parents[2]
MIB = 2**20

Capture = pytest.CaptureFixture[str]

# What CLI.md promises of the JSON.
ESTIMATE_KEYS = {
    *("schema", "model", "batch", "job", "device", "peak_allocated_mib", "peak_reserved_mib"),
    *("end_allocated_mib", "process_mib", "process_upper_mib", "fits", "p_out_of_memory", "retries"),
    *("failure", "breakdown_mib"),
    *("calibration", "assumptions", "unknown_ops", "seconds"),
}
MAX_BATCH_KEYS = {
    *("schema", "model", "job", "device", "confidence", "max_batch", "comfortable_batch", "at_max"),
    *("first_failure", "probes", "seconds"),
}
MODELS = """
import torch
import torchvision
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)


class Fine(Base):
    def forward(self, x):
        print("chatter of the model")
        return self.head(x)


class Picky(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Item(Base):
    def __init__(self):
        super().__init__()
        self.inner = Picky()

    def forward(self, x):
        return self.inner(self.head(x))


class Sparse(nn.Module):
    def forward(self, x):
        return x + torch.nonzero(x).sum()


class NonZero(Base):
    def __init__(self):
        super().__init__()
        self.inner = Sparse()

    def forward(self, x):
        return self.inner(self.head(x))


class Boxes(nn.Module):
    def forward(self, x):
        return x[torchvision.ops.nms(x, x[:, 0], 0.5)]


class Nms(Base):
    def __init__(self):
        super().__init__()
        self.inner = Boxes()

    def forward(self, x):
        return self.inner(self.head(x))


class Masked(Base):
    def forward(self, x):
        x = self.head(x)
        return x[x > 0]


class Exits(Base):
    def forward(self, x):
        raise SystemExit(7)
"""


def toy_events(
    per_sample_bytes: int, fixed_bytes: int = 0
) -> tuple[Alloc | AffineAlloc | Free | PhaseStart, ...]:
    return (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 3 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
        AffineAlloc(1, fixed_bytes, per_sample_bytes, Category.ACTIVATION, 0),
        PhaseStart(1, Phase.END),
    )


def saved(path: Path, trace: Trace | Program, **about: object) -> Path:
    job = Job.create("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=1)
    save_trace(trace, path, {"job": job_to_json(job), "batch": 5, "capability": [8, 6]} | about)
    return path


def outcome(command: str, capsys: Capture) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line without quotes."""
    code = run(command.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A fresh Python with the repository on its path."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


# ---- saved traces --------------------------------------------------------------------------------


def without_seconds(answer: object) -> object:
    if isinstance(answer, dict):
        return {key: without_seconds(value) for key, value in answer.items() if key != "seconds"}
    return answer
