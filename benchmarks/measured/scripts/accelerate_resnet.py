"""Train a ResNet with accelerate in bfloat16, clipping gradients, with an evaluation and a saved state."""

from tempfile import mkdtemp

import torch
import torchvision
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="bf16")
model = torchvision.models.resnet50(num_classes=100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(96, 3, 224, 224), torch.randint(0, 100, (96,)))
loader, validation = DataLoader(data, batch_size=32), DataLoader(data, batch_size=64)
model, optimizer, loader, validation = accelerator.prepare(model, optimizer, loader, validation)
for epoch in range(2):
    model.train()
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for images, labels in validation:
            scores = accelerator.gather_for_metrics(model(images).argmax(1))
    accelerator.save_state(mkdtemp())
