"""Train with torchao's CPUOffloadOptimizer in a step of one's own.

python host_optimizer.py '{"batch": 32, "layers": 4, "offload_gradients": true, ...}'
"""

import json
import sys
from typing import Any

import torch
from activation_memory import Net
from torch import Tensor
from torch.nn import functional
from torchao.optim import CPUOffloadOptimizer


class Training:
    """Blocks of a transformer, whose large parameters are updated on the CPU."""

    def __init__(
        self,
        width: int = 256,
        layers: int = 4,
        dtype: str = "float32",
        autocast: bool = False,
        kind: str = "AdamW",
        clip: bool = False,
        keeps: bool = False,
        **optimizer: Any,
    ) -> None:
        self.model = Net(width, layers).to("cuda", getattr(torch, dtype))
        trained = [*self.model.parameters()]
        if keeps:  # only the blocks are trained
            self.model.head.requires_grad_(False)
        self.optimizer = CPUOffloadOptimizer(trained, getattr(torch.optim, kind), **optimizer)
        self.dtype, self.autocast, self.clip = getattr(torch, dtype), autocast, clip

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        """Run one step."""
        inputs, labels = inputs.to("cuda", self.dtype), labels.to("cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss = functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    batch, tokens, width = given.pop("batch"), given.pop("tokens", 128), given.get("width", 256)
    training = Training(**given)
    for _ in range(3):
        training.step(torch.zeros(batch, tokens, width), torch.zeros(batch, dtype=torch.int64))
