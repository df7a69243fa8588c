"""What a loop is handed: where its batches come from, who hears of its phases, what it runs on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, optim

from planner.program import Category, Phase

Fetch = Callable[[], tuple[tuple[Any, ...], dict[str, Any], Any]]  # inputs, keyword inputs, target
OnPhase = Callable[[int, Phase], None]
Label = Callable[[Tensor, Category], None]


class Scaler(Protocol):
    """As much of `torch.amp.GradScaler` as a loop needs."""

    def scale(self, outputs: Tensor) -> Tensor: ...
    def unscale_(self, optimizer: optim.Optimizer) -> None: ...
    def step(self, optimizer: optim.Optimizer) -> object: ...
    def update(self) -> None: ...


def _unheard(tensor: Tensor, role: Category) -> None:
    """Nobody asks what a tensor is for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the loop runs on: autocast and gradient scaling are not the same on `meta` and on a GPU."""

    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # a new region
    scaler: Scaler | None = None
    criterion: Callable[[Any, Any], Tensor] | None = None  # the loss that the job has of its own
    label: Label = _unheard  # hears what a tensor is for that the loop itself makes and keeps between steps
