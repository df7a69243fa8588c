"""Traces that are told and not run, against runs."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from planner.capture.session import record
from planner.capture.symbolic.foretold import Foretold
from planner.capture.symbolic.recast import differs
from planner.errors import ModelError
from planner.jobs import Checkpoint, Job, Precision
from planner.program.events import Trace, check
from planner.program.target import Target
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace
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


class Counted:
    """A way of building a model that counts how often that is done."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.calls, self.build = 0, on_meta(build)

    def __call__(self, job: Job) -> nn.Module:
        self.calls += 1
        return self.build(job)


def run_at(batch: int, job: Job, build: Callable[[], nn.Module]) -> Trace:
    return record(job, batch, AMPERE, on_meta(build), sm_count=CHIP.sm_count)


@pytest.mark.parametrize("build", [Attending, Blocks])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_FP16])
def test_what_is_told_is_what_a_run_records(build: Callable[[], nn.Module], precision: Precision) -> None:
    """Event by event, for any batch size, after three runs; batch 1, which is on no line, is a fourth."""
    job = replace(training(), precision=precision)
    if build is Blocks:
        job = replace(job, checkpoint=Checkpoint.BLOCKS)
    counted = Counted(build)
    told = Foretold(job, CHIP, counted)
    for batch in (2, 3, 333, 334, 5, 17, 64):
        found = told(batch)
        check(found)
        assert differs(found, run_at(batch, job, build)) == ""
        assert found.notes == run_at(batch, job, build).notes
    assert counted.calls == 3
    assert differs(told(1), run_at(1, job, build)) == ""
    assert counted.calls == 4


def test_one_batch_size_is_one_run() -> None:
    """Whoever asks for no other need not wait for a loop."""
    counted = Counted(Attending)
    Foretold(training(), CHIP, counted)(64)
    assert counted.calls == 1


@pytest.mark.parametrize("asked", [45, 60])
def test_a_model_that_takes_another_path_is_run(asked: int) -> None:
    """Below the fork as well, where the run that has to bear the loop out lies above it."""
    job = replace(training(), inputs=(replace(training().inputs[0], shape=(64,)),))
    told = Foretold(job, CHIP, on_meta(Forking))
    for batch in (2, 3, asked, asked + 10):
        assert differs(told(batch), run_at(batch, job, Forking)) == ""


def test_a_third_run_that_fails_is_no_answer() -> None:
    """A batch that runs is answered although the one above it, which nobody asked for, does not run."""
    job = replace(training(), inputs=(replace(training().inputs[0], shape=(64,)),))
    told = Foretold(job, CHIP, on_meta(Forking))
    for batch in (2, 3, 88):
        assert differs(told(batch), run_at(batch, job, Forking)) == ""
    with pytest.raises(ModelError, match="too many"):
        told(91)
