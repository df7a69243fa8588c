"""Train a ViT by hand in mixed float16, evaluate it at a larger batch, save a checkpoint and go on from it."""

from pathlib import Path
from tempfile import mkdtemp

import torch
import torchvision
from torch.nn import functional

torch.manual_seed(0)
model = torchvision.models.vit_b_16(num_classes=100).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
path = Path(mkdtemp()) / "last.pt"


def train(steps):
    model.train()
    for _ in range(steps):
        images, labels = torch.randn(32, 3, 224, 224).cuda(), torch.randint(0, 100, (32,)).cuda()
        with torch.autocast("cuda", torch.float16):
            loss = functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate():
    model.eval()
    right = torch.zeros((), device="cuda")
    for _ in range(2):
        images, labels = torch.randn(96, 3, 224, 224).cuda(), torch.randint(0, 100, (96,)).cuda()
        with torch.autocast("cuda", torch.float16):
            right += (model(images).argmax(1) == labels).sum()
    return right.item()


train(3)
evaluate()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
state = torch.load(path, map_location="cuda")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
train(2)
