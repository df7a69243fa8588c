"""Traces that are derived and not run, against runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.capture.session import record
from planner.capture.symbolic.builder import ProgramBuilder
from planner.capture.symbolic.validate import find_valid_range
from planner.errors import ModelError
from planner.jobs import Checkpoint, Job, Loss, MemoryFormat, Precision
from planner.program import ignore_progress
from planner.program.diff import first_divergence
from planner.program.events import Trace, validate
from planner.program.target import Target
from planner.store.source import ProgramSource
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace
from tests.helpers.traces import alloc, program_of
from tests.program.test_specialize import Attending, on_meta, training

CHIP = Target.for_capability(AMPERE)


class Blocks(nn.Module):
    """Repeated blocks, which `--checkpoint blocks` runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True) for _ in "abc"))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.flatten(2).transpose(1, 2).reshape(len(x), -1, 12)).mean((1, 2))


class Forking(nn.Module):
    """Another layer from batch 50 on, and nothing of more than 90 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 90:
            raise RuntimeError("too many")
        return self.few(x) if len(x) < 50 else self.many(self.few(x))


class Normed(nn.Module):
    """Batch norm over single values, which refuses batch 1 in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mean((2, 3), keepdim=True))


class Counted:
    """A way of building a model that counts how often that is done."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.calls, self.build = 0, on_meta(build)

    def __call__(self, job: Job) -> nn.Module:
        self.calls += 1
        return self.build(job)


def run_at(batch: int, job: Job, build: Callable[[], nn.Module]) -> Trace:
    return record(job, batch, AMPERE, on_meta(build), sm_count=CHIP.sm_count)


@pytest.mark.slow
@pytest.mark.parametrize("build", [Attending, Blocks])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_FP16])
def test_a_program_is_what_a_run_records(build: Callable[[], nn.Module], precision: Precision) -> None:
    """Event by event, for any batch size, after three runs; batch 1, which no program covers, is a fourth."""
    job = training().replace(precision=precision)
    if build is Blocks:
        job = job.replace(checkpoint=Checkpoint.BLOCKS)
    counted = Counted(build)
    source = ProgramSource(job, (), lambda: ProgramBuilder(job, counted, ignore_progress))
    for batch in (2, 3, 333, 334, 5, 17, 64):
        trace = source.trace(batch, CHIP)
        validate(trace)
        assert first_divergence(trace, run_at(batch, job, build)) == ""
        assert trace.notes[:-1] == run_at(batch, job, build).notes
    assert counted.calls == 3
    assert first_divergence(source.trace(1, CHIP), run_at(1, job, build)) == ""
    assert counted.calls == 4


class Crossed(nn.Module):
    """Batch norm and a roll of activations in neither format, and rows of a table by index."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.volumes = nn.BatchNorm3d(8)
        self.table = nn.Parameter(torch.empty(50, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).transpose(2, 3))
        z = self.volumes(y.unsqueeze(2).to(memory_format=torch.channels_last_3d))
        rows = self.table[torch.arange(len(x), device=x.device) % 50]
        return z.roll((1, 2), (3, 4)).sum((1, 2, 3, 4)) + rows.sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_BF16, Precision.BF16])
def test_a_program_of_other_layouts_is_what_a_run_records(
    precision: Precision, memory_format: MemoryFormat
) -> None:
    """The rules that follow strides hold for symbolic batch sizes as for numbers."""
    job = training().replace(precision=precision, memory_format=memory_format)
    source = ProgramSource(job, (), lambda: ProgramBuilder(job, on_meta(Crossed), ignore_progress))
    for batch in (2, 3, 333, 334, 17, 5000):
        assert first_divergence(source.trace(batch, CHIP), run_at(batch, job, Crossed)) == ""


def test_one_batch_size_is_one_run() -> None:
    """A single batch size is one run and does not wait for a program."""
    counted = Counted(Attending)
    builder = ProgramBuilder(training(), counted, ignore_progress)
    ProgramSource(training(), (), lambda: builder).trace(64, CHIP)
    assert counted.calls == 1


def test_a_model_that_takes_another_path_is_run() -> None:
    """A program that no run at a large batch confirms is used for no batch size."""
    job = training().replace(inputs=(replace(training().samples.inputs[0], shape=(64,)),))
    source = ProgramSource(job, (), lambda: ProgramBuilder(job, on_meta(Forking), ignore_progress))
    assert source.bound(CHIP) is None
    for batch in (2, 3, 45, 60, 88):
        assert first_divergence(source.trace(batch, CHIP), run_at(batch, job, Forking)) == ""
    with pytest.raises(ModelError, match="too many"):
        source.trace(91, CHIP)


def test_the_end_of_the_valid_range_is_bisected() -> None:
    """The end lies within 1/32 of the truth if a large batch diverges and a smaller one agrees."""
    program = program_of([alloc(0, 0, 2**20)])

    def divergence(batch: int) -> str:
        return "event 0" if batch > 20_000 else ""

    assert 20_000 * 31 / 32 <= find_valid_range(program, divergence) <= 20_000
    assert find_valid_range(program, lambda batch: "event 0") == 0


def test_a_large_model_may_refuse_batch_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run at batch 1, made beforehand for small GPUs, is left out; a trace of batch 1 has the error."""
    monkeypatch.setattr("planner.capture.symbolic.validate.BATCH_ONE_BYTES", 1)
    job = training().replace(target=None, loss=Loss.SUM)
    source = ProgramSource(job, (), lambda: ProgramBuilder(job, on_meta(Normed), ignore_progress))
    assert source.bound(CHIP) is not None
    assert first_divergence(source.trace(333, CHIP), run_at(333, job, Normed)) == ""
    with pytest.raises(ModelError, match="fails at batch 1"):
        source.trace(1, CHIP)
