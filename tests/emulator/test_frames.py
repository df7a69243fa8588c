"""Frames that the recorder looks at when memory runs out."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from planner.emulator.child.frames import place


class Variable:
    """What a variable of a model's method holds."""


class Block(nn.Module):
    """A model whose forward pass looks for its place, as when an allocation is refused."""

    def forward(self) -> "tuple[str, weakref.ref[Variable], weakref.ref[Variable], bool]":
        """Return the module's name, both variables, and whether the deleted one is gone at once."""
        deleted, kept = Variable(), Variable()
        names = place(torch)["module"]
        first, second = weakref.ref(deleted), weakref.ref(kept)
        del deleted
        return names, first, second, first() is None


@pytest.fixture(autouse=True)
def _without_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_the_place_of_a_refused_allocation_is_the_module_that_runs() -> None:
    assert nn.Sequential(nn.Identity(), Block())[1]()[0] == "Block"


def test_a_refused_allocation_keeps_no_variable_alive_that_the_script_lets_go() -> None:
    _, deleted, kept, was_gone_at_once = Block()()
    assert was_gone_at_once
    assert (deleted(), kept()) == (None, None)


class Refused(torch.optim.SGD):
    """An optimizer whose step looks for its place, as when its state is refused."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Note the phase."""
        self.phase = place(torch)["phase"]


def test_a_refused_allocation_of_an_optimizer_names_its_phase() -> None:
    optimizer = Refused(nn.Linear(1, 1).parameters())
    optimizer.step()
    assert (optimizer.phase, place(torch)["phase"]) == ("optimizer", "")
