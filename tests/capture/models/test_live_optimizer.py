"""Optimizers in use, planned with their own options and groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from planner.api.integrations.live_model import LiveLoop, plan_live_model
from planner.capture.models.live.optimizer import fields_of_optimizer, notes_of_optimizer, read_optimizer
from planner.errors import UsageError

WIDTH = 1024
WEIGHTS_MIB = (WIDTH * WIDTH + WIDTH) * 4 / 2**20


class Own(optim.SGD):
    """A class of the user's own, whose attribute decides its step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_ready = True

    def step(self, closure: Any = None) -> Any:
        assert self.is_ready
        return super().step(closure)


def network() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def step(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(batch).sum()
    return loss


def at_max(make: Callable[[nn.Module], optim.Optimizer], module: nn.Module | None = None) -> dict[str, Any]:
    """Return the answer for a batch on a GPU whose limit the optimizer's step reaches."""
    module = network() if module is None else module
    optimizer = make(module)
    live = read_optimizer(optimizer, module)
    loop = LiveLoop(
        module, torch.zeros(2, WIDTH), step, fields_of_optimizer(optimizer),
        notes=notes_of_optimizer(live), optimizer=live,
    )  # fmt: skip
    answer = plan_live_model(loop, {"allocator_cap_mib": 256, "dataset_size": 64}).to_dict()["at_max"]
    assert answer is not None
    return dict(answer)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda module: optim.AdamW(module.parameters()), 2),
        (lambda module: optim.AdamW(module.parameters(), amsgrad=True), 3),
        (lambda module: optim.AdamW(module.parameters(), fused=True, amsgrad=True), 3),
        (lambda module: optim.SGD(module.parameters(), 0.1), 0),
        (lambda module: optim.SGD(module.parameters(), 0.1, momentum=0.9), 1),
        (lambda module: optim.RMSprop(module.parameters()), 1),
        (lambda module: optim.RMSprop(module.parameters(), centered=True, momentum=0.9), 3),
        (lambda module: optim.NAdam(module.parameters()), 2),
        (lambda module: optim.Rprop(module.parameters()), 2),
        (lambda module: Own(module.parameters(), momentum=0.9), 1),
        (lambda module: optim.AdamW([{"params": [module.weight]}, {"params": [module.bias], "lr": 1}]), 2),
        (lambda module: optim.AdamW([module.bias]), 2 / (WIDTH + 1)),  # the weight has no state
    ],
)
def test_states_are_those_of_the_optimizer(make: Callable[[Any], optim.Optimizer], states: float) -> None:
    """Each option that adds a state for each parameter adds its bytes to the plan."""
    taken = at_max(make)["breakdown_mib"]["optimizer"]
    assert taken == pytest.approx(states * WEIGHTS_MIB, abs=0.01)


def test_weight_decay_of_sgd_takes_a_copy_of_the_gradients() -> None:
    """SGD adds decay to gradients in new tensors, as AdamW does not, so that the step's peak is higher."""

    def peak(kind: Any, decay: float) -> float:
        answer = at_max(lambda module: kind(module.parameters(), lr=0.1, weight_decay=decay))
        return float(answer["peak_allocated_mib"])

    assert peak(optim.SGD, 0.1) > peak(optim.SGD, 0)
    assert peak(optim.AdamW, 0.1) == peak(optim.AdamW, 0)


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    """A parameter that is not trained takes its own bytes alone."""
    module = network()
    module.weight.requires_grad_(False)
    parts = at_max(lambda one: optim.AdamW(one.parameters()), module)["breakdown_mib"]
    assert parts["parameters"] == pytest.approx(WEIGHTS_MIB, abs=0.01)
    assert parts["optimizer"] + parts["gradients"] < 0.1


def test_options_are_named() -> None:
    """The answer names the options that depart from the class's default and decide memory."""
    answer = at_max(lambda module: optim.AdamW(module.parameters(), amsgrad=True, capturable=True))
    assert "the optimizer is planned with its own settings: amsgrad=True" in answer["assumptions"]


def test_overrides_of_bitsandbytes_are_those_of_the_original() -> None:
    """A parameter with 32 bits of state keeps them in the plan, and others have 8."""
    adamw = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()

    def overridden(module: Any) -> optim.Optimizer:
        manager.override_config(module.weight, "optim_bits", 32)
        made: optim.Optimizer = adamw(module.parameters())
        return made

    try:
        wide = at_max(overridden)["breakdown_mib"]["optimizer"]
    finally:
        manager.pid2config.clear()
    narrow = at_max(lambda module: adamw(module.parameters()))["breakdown_mib"]["optimizer"]
    assert wide == pytest.approx(2 * WEIGHTS_MIB, abs=0.01)
    assert narrow == pytest.approx(2 * WEIGHTS_MIB * (1 + 4 / 256) / 4, abs=0.02)


def test_a_closure_is_refused() -> None:
    """LBFGS calls the loss as often as values decide."""
    module = network()
    with pytest.raises(UsageError, match="optimizer LBFGS calls the loss several times in a step"):
        read_optimizer(optim.LBFGS(module.parameters()), module)


def test_parameters_of_another_model_are_refused() -> None:
    """An optimizer made from another model is refused, with what to do."""
    optimizer = optim.SGD(network().parameters(), 0.1)
    with pytest.raises(
        UsageError, match="2 parameters that the model has not; make it from model.parameters"
    ):
        read_optimizer(optimizer, network())


def test_a_differentiable_optimizer_is_refused() -> None:
    """An optimizer whose steps are part of the graph is refused."""
    optimizer = optim.SGD(network().parameters(), 0.1, differentiable=True)
    with pytest.raises(UsageError, match="differentiable=True is not planned"):
        fields_of_optimizer(optimizer)
