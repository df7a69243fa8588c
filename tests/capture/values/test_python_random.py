"""Random numbers that models draw without torch are named."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.capture.session import record
from planner.jobs import Job, Loss, Mode
from planner.jobs.parse import parse_tensor_spec
from tests.helpers.models import AMPERE


class Cropped(nn.Module):
    """Multiplies as many columns as a function gives."""

    def __init__(self, columns: Callable[[], int]) -> None:
        super().__init__()
        self.columns = columns
        self.weight = nn.Parameter(torch.ones(8, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        columns = self.columns()
        return (x[:, :columns] * self.weight[:columns]).sum()


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (lambda: random.randint(1, 8), "random"),
        (lambda: int(np.random.randint(1, 8)), "numpy.random"),
        (lambda: 8, ""),
        (lambda: 4 + int(torch.ones(4, device="cpu").sum()) // 2, ""),
    ],
)
def test_draws_are_named(columns: Callable[[], int], named: str) -> None:
    """The trace of a model that draws from the global generators says so, and no other does."""
    job = Job.create("Cropped", inputs=(parse_tensor_spec("8"),), mode=Mode.TRAIN, loss=Loss.OUTPUT, steps=2)
    trace = record(job, 4, AMPERE, lambda _: Cropped(columns))
    notes = [note for note in trace.notes if note.startswith("the model draws numbers from")]
    assert [note.split(" from ")[1].split(":")[0] for note in notes] == [named][: bool(named)]
