"""Gradient scaling in a trace: torch's own, which asks the values of gradients one question less."""

from typing import Any

import torch
from torch import optim


class MetaScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` on meta, where no gradient is ever found infinite, so that every step is taken.

    Its tensors are torch's: the scale and the growth tracker from the first step on, and the inverse of the
    scale and the flag of each step (torch/amp/grad_scaler.py).
    """

    def __init__(self) -> None:
        super().__init__(device="meta")

    def _maybe_opt_step(
        self, optimizer: optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        taken: float | None = optimizer.step(*args, **kwargs)
        return taken
