"""Models that tell torch.compile how much of their activations to keep: `activation_memory_budget`."""

import torch
import torch._functorch.config
from activation_memory import Net


class Tight(Net):
    """Keeps a share of what eager code keeps, and computes the rest again in the backward pass."""

    share = 0.3

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        torch._functorch.config.activation_memory_budget = self.share
        super().__init__(width, layers)


class Half(Tight):
    """Keeps half."""

    share = 0.5


class Least(Tight):
    """Keeps the inputs alone."""

    share = 0.0


class All(Tight):
    """Keeps what the compiler chooses, as by default."""

    share = 1.0
