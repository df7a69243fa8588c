"""Classifiers of images: ResNet-50 of torchvision by SGD with momentum, and three linear layers by Adam."""

import torch
import torchvision
from torch import Tensor, nn

DEVICE = "cuda"


class Training:
    """The loop's model, optimizer and names.

    Inputs and labels are of one batch that is kept, or live until the next batch replaces them. The output of
    a step lives until the next one replaces it, and so does its loss with `keeps_loss`.
    """

    def __init__(self, is_mlp: bool = False, keeps_batch: bool = False, keeps_loss: bool = True) -> None:
        self.model: nn.Module = _mlp() if is_mlp else torchvision.models.resnet50()
        self.model.to(DEVICE)
        if is_mlp:
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.loss_of = nn.CrossEntropyLoss()
        self.keeps_batch, self.keeps_loss = keeps_batch, keeps_loss
        self.batch: tuple[Tensor, Tensor] | None = None
        self.output: Tensor | None = None
        self.loss: Tensor | None = None

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        """Run one step."""
        if self.batch is None or not self.keeps_batch:
            self.batch = None
            self.batch = inputs.to(DEVICE), labels.to(DEVICE)
        inputs, labels = self.batch
        self.optimizer.zero_grad(set_to_none=True)
        self.output = self.model(inputs)
        self.loss = self.loss_of(self.output, labels)
        self.loss.backward()
        if not self.keeps_loss:
            self.loss = None
        self.optimizer.step()


def _mlp() -> nn.Module:
    hidden = nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))
