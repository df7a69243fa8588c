"""Checks of values that scripts make of tensors on an emulated GPU, whose values read as zero."""

import sys

import pytest

from planner.emulator.child.truths import raises_if_false
from tests.emulator.test_emulated_training import Emulator, emulator  # noqa: F401

SCRIPT = """
import torch
from torch import distributions

x = torch.randn(4, 3, device="cuda")
loss = x.pow(2).mean()
assert torch.isfinite(loss) and torch.isfinite(x).all() and x.isfinite().all().item()
assert (torch.isfinite(loss) & torch.isfinite(x).all()).cpu()
assert not (~torch.isfinite(loss)).any() and not torch.isnan(loss)
assert torch.allclose(x, x) and torch.isclose(x, x).all()
torch.testing.assert_close(loss, loss)
assert len(str(x)) > 20

boxes = torch.rand(5, 4, device="cuda")
assert (boxes[:, 2:] >= 0).all() and (boxes <= 1).all(), f"{boxes}"
if not (boxes >= 0).all():
    raise ValueError("boxes are below 0")
ended = False
if (boxes >= 0).all():  # nothing tells which branch is taken
    ended = True
assert not ended

chosen = distributions.Categorical(logits=x)
chosen.log_prob(chosen.sample())
distributions.MultivariateNormal(torch.zeros(2, device="cuda"), torch.eye(2, device="cuda")).rsample()

for mean, std in ((x, x.exp()), (0.5, x.exp()), (x, 0.5)):
    drawn = torch.normal(mean, std)
    assert drawn.shape == x.shape and drawn.dtype == x.dtype and drawn.is_cuda
torch.distributions.Normal(x, x.exp()).sample((3,))
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
scaler.scale(loss)
assert scaler.get_scale() == 1024
kept = torch.where(torch.isfinite(x), x, 0)
assert type(kept) is torch.Tensor and type(x[torch.isfinite(x)]) is torch.Tensor
torch.func.vmap(lambda row: torch.isfinite(row).all())(x)
torch.compile(lambda x: torch.where(torch.isfinite(x), x, 0).sum(), fullgraph=True)(x)
assert not torch.isfinite(torch.tensor(float("inf")))  # on the CPU values are what they are
assert not torch.allclose(torch.ones(2), torch.zeros(2))
"""


@pytest.mark.parametrize(
    ("body", "is_taken_for_true"),
    [
        ("if not value: raise ValueError(f'{value} is false')", True),
        ("assert value, 'is false'", True),
        ("assert value and True, f'{value!r}'", True),
        ("assert not value", False),
        ("if value: raise ValueError", False),
        ("if value: print()", False),
        ("while not value: break", False),
        ("if not value:\n    for number in (): raise ValueError", False),
    ],
)
def test_a_condition_is_true_if_the_code_raises_where_it_is_false(body: str, is_taken_for_true: bool) -> None:
    """Only a branch that raises at once tells what a script takes for granted."""
    answers = []

    class Zero:
        def __bool__(self) -> bool:
            frame = sys._getframe(1)
            answers.append(raises_if_false(frame.f_code, frame.f_lasti))
            return answers[-1]

    exec(body, {"value": Zero()})
    assert answers == [is_taken_for_true]


@pytest.mark.emulated
def test_checks_of_values_pass(emulator: Emulator) -> None:  # noqa: F811
    """A guard against losses that are not finite ends no script, and distributions take their parameters."""
    assert emulator.run(SCRIPT, "--gpu", "T4")["exit_code"] == 0
