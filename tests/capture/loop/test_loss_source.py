"""The answer names which of several outputs of a model became the loss."""

import json
from pathlib import Path

import pytest
import torch

from planner.capture.loop.loss_source import notes_on_loss
from planner.cli import run
from planner.jobs import Loss

MODELS = """
from collections import namedtuple
from torch import nn

Pair = namedtuple("Pair", "mean more")

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

class One(Base):
    def forward(self, x):
        return self.head(x)

class Losses(Base):
    def forward(self, x):
        out = self.head(x)
        return {"logits": out, "loss": out.mean(), "seen": 7}

class Two(Base):
    def forward(self, x):
        return {"out": self.head(x), "aux": self.head(x), "index": x.long()}

class Named(Base):
    def forward(self, x):
        return Pair(self.head(x), x)

class Single(Base):
    def forward(self, x):
        return {"logits": self.head(x), "index": x.long()}

class Listed(Base):
    def forward(self, x):
        return [self.head(x).mean(), x]

class LossLast(Base):
    def forward(self, x):
        out = self.head(x)
        return out, out.mean(), out.sum().long()

class Unnamed(Base):
    def forward(self, x):
        out = self.head(x)
        return {"logits": out, "nll": out.mean()}
"""


REST = "that the model returns; its other outputs are not used"


@pytest.mark.parametrize(
    ("model", "loss", "notes"),
    [
        ("One", "mse", []),
        ("Losses", "output", [f"the loss is 'loss' {REST}"]),
        ("Listed", "output", [f"the loss is the first of the values {REST}"]),
        ("LossLast", "output", [f"the loss is output[1] {REST}"]),
        ("Unnamed", "output", [f"the loss is 'nll' {REST}"]),
        ("Two", "mse", ["the loss is the sum of the mse losses of what the model returns as 'out', 'aux'"]),
        ("Single", "mse", ["the loss is the mse of what the model returns as 'logits'"]),
        ("Named", "sum", ["the loss is the sum of all elements of what the model returns as 'mean', 'more'"]),
    ],
)
def test_the_entries_that_became_the_loss_are_named(
    tmp_path: Path, model: str, loss: str, notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Among the assumptions, in one sentence; none for a model that returns one tensor."""
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    words = ["--model", f"{file}:{model}", "--input", "4", "--loss", loss]
    words += ["--target", "3"] if loss == "mse" else []
    assert run(["estimate", *words, "--batch", "2", "--no-cache", "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumptions"]
    assert [line for line in assumed if line.startswith("the loss is ")] == notes


def test_a_library_output_is_named_too(capsys: pytest.CaptureFixture[str]) -> None:
    """transformers returns objects that are mappings as well."""
    words = ["--model", "hf:GPT2LMHeadModel", "--model-arg", "n_layer=1", "--input", "16:int64"]
    assert run(["max-batch", *words, "--gpu", "L4", "--json", "--no-cache"]) == 0
    assumed = json.loads(capsys.readouterr().out)["at_max"]["assumptions"]
    assert f"the loss is 'loss' {REST}" in assumed


def test_the_loss_of_a_training_step_is_the_one_it_returns() -> None:
    """A training_step may return its loss in a dict, beside values that are logged."""
    output = {"logits": torch.ones(4, 2), "loss": torch.ones(())}
    assert notes_on_loss(Loss.TRAINING_STEP, output) == (f"the loss is 'loss' {REST}",)
