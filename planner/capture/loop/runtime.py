"""Dependencies of the training loop: batch loader, phase hook, autocast and gradient scaler."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from msgspec import Struct
from torch import Tensor, optim

from planner.program import Category, Phase

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]  # inputs, keyword inputs, target
BatchLoader = Callable[[], Batch]  # copies the next batch to the device
PhaseHook = Callable[[int, Phase], None]  # called with the step and the phase as each phase starts
CategoryHook = Callable[[Tensor, Category], None]  # called with each tensor that the loop itself makes


class Scaler(Protocol):
    """The methods of `torch.amp.GradScaler` that the loop calls."""

    def scale(self, outputs: Tensor) -> Tensor: ...
    def unscale_(self, optimizer: optim.Optimizer) -> None: ...
    def step(self, optimizer: optim.Optimizer) -> object: ...
    def update(self) -> None: ...


class LoopRuntime(Struct, frozen=True):
    """Autocast, gradient scaling and hooks, which differ between `meta` and a GPU."""

    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # opens a new region
    scaler: Scaler | None = None
    criterion: Callable[[Any, Any], Tensor] | None = None  # the job's own loss
    set_category: CategoryHook = lambda tensor, category: None  # of tensors kept between steps
