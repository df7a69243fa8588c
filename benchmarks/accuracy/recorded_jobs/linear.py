"""One linear layer of 10,000 to 50,000 features, called again and again; its names keep the last batch."""

import torch
from torch import Tensor, nn

DEVICE = "cuda"


class Calls:
    """Each call replaces the inputs, then the outputs, of the call before."""

    def __init__(self, records_gradients: bool = True) -> None:
        self.layer = nn.Linear(10_000, 50_000, device=DEVICE)
        self.records_gradients = records_gradients
        self.inputs: Tensor | None = None
        self.outputs: Tensor | None = None

    def step(self, batch: Tensor) -> None:
        """Make a batch, which lies on the CPU, one of the GPU; call the layer."""
        with torch.set_grad_enabled(self.records_gradients):
            self.inputs = batch.to(DEVICE)
            self.outputs = self.layer(self.inputs)
