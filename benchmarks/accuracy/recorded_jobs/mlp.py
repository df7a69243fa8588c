"""Two layers with a rectifier between them, trained without an optimizer's state on one batch.

Output and loss of a step live until the next one replaces them.
"""

import torch
from torch import Tensor, nn

DEVICE = "cuda"
INPUTS, HIDDEN = 10, 20


class Training:
    """The loop's model, batch and names."""

    def __init__(self, samples: int) -> None:
        self.model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)).to(DEVICE)
        self.inputs = torch.zeros(samples, INPUTS, device=DEVICE)
        self.targets = torch.zeros(samples, 1, device=DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.output: Tensor | None = None
        self.loss: Tensor | None = None

    def step(self, _: Tensor) -> None:
        """Run one step."""
        self.output = self.model(self.inputs)
        self.loss = nn.functional.mse_loss(self.output, self.targets)
        self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
