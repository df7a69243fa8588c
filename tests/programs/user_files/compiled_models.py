"""Models to compile: activations and norms whose operators are one kernel on CUDA, and a graph that breaks."""

import torch
from torch import Tensor, nn


class MishNet(nn.Module):
    """Convolutions with Mish and SiLU, and a graph break before the head."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.Mish())
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.Mish())
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2 * width, 2 * width, 1), nn.SiLU())
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(self.stem(images))
        features = features * self.gate(features)
        torch._dynamo.graph_break()
        return self.head(nn.functional.mish(features).mean((2, 3)))


class Normalized(nn.Module):
    """Two gated blocks with RMSNorm."""

    def __init__(self, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        for norm, gate, down in zip(self.norms, self.gates, self.downs, strict=True):
            tokens = tokens + down(nn.functional.silu(gate(norm(tokens))))
        return self.head(tokens.mean(1))
