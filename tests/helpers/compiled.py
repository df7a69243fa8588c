"""Models that tests compile, and what their compiled code allocates."""

import torch
from torch import Tensor, nn

BATCH, WIDTH, HIDDEN, CLASSES = 64, 32, 256, 16
WORKSPACE = 8_519_680  # that cuBLAS keeps for each of two threads
FLUSHED = 52_428_800  # the buffer that inductor writes between two timed kernels


class Gated(nn.Module):
    """Two linear layers with pointwise operators between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(torch.sigmoid(hidden) * torch.tanh(hidden))


class Broken(Gated):
    """Break the graph in the middle; the part between runs as eager code."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.sigmoid(hidden) * torch.tanh(hidden))
