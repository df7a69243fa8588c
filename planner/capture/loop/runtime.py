"""Define the objects that a loop depends on.

These are the batch loader, hooks, autocast and gradient scaler.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from msgspec import Struct
from torch import Tensor
from torch.amp import GradScaler

from planner.program import Category, Phase

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]  # inputs, keyword inputs, target
BatchLoader = Callable[[], Batch]  # copies the next batch to the device
PhaseHook = Callable[[int, Phase], None]  # called with the step and the phase as each phase starts
CategoryHook = Callable[[Tensor, Category], None]  # called with each tensor that the loop itself makes


class LoopRuntime(Struct, frozen=True):
    """The autocast, gradient scaler, loss and category hook of a loop.

    The loop runs in a capture or on a GPU.
    """

    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # returns a new region
    scaler: GradScaler | None = None
    criterion: Callable[[Any, Any], Tensor] | None = None  # a loss of user code
    set_category: CategoryHook = lambda tensor, category: None  # for tensors that outlive a step
