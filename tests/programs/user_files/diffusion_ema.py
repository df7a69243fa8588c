"""A diffusion model from scratch: cosine schedule, residual blocks with time, weights averaged, micro-batches."""

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.time = nn.Linear(time, 2 * outputs)
        self.norm = nn.GroupNorm(8, outputs)
        self.second = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, t):
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, dim=1)
        h = self.norm(self.first(x)) * (1 + scale) + shift
        return self.second(h) + self.skip(x)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.frequencies = nn.Buffer(torch.exp(-math.log(10000) * torch.arange(32) / 32))
        self.time = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2 = Block(width, width, 256), Block(width, 2 * width, 256)
        self.middle = Block(2 * width, 2 * width, 256)
        self.up2, self.up1 = Block(4 * width, width, 256), Block(2 * width, width, 256)
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x, t):
        angles = t[:, None] * self.frequencies
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        a = self.down1(self.enter(x), t)
        b = self.down2(F.avg_pool2d(a, 2), t)
        h = self.middle(F.avg_pool2d(b, 2), t)
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2), b], dim=1), t)
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2), a], dim=1), t)
        return self.leave(h)


class Trainer:
    def __init__(self, micro_batches=2, decay=0.9999):
        self.model = Denoiser().cuda()
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-4)
        self.micro_batches, self.decay = micro_batches, decay

    def loss(self, images):
        t = torch.rand(len(images), device=images.device)
        alpha = torch.cos(t * math.pi / 2)[:, None, None, None]
        sigma = torch.sin(t * math.pi / 2)[:, None, None, None]
        noise = torch.randn_like(images)
        predicted = self.model(alpha * images + sigma * noise, t * 1000)
        return F.mse_loss(predicted, alpha * noise - sigma * images)

    @torch.no_grad()
    def update_average(self):
        for ours, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
            ours.lerp_(theirs, 1 - self.decay)

    def step(self, images):
        images = images.cuda() * 2 - 1
        total = 0.0
        for part in images.chunk(self.micro_batches):
            loss = self.loss(part) / self.micro_batches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.update_average()
        return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    data = TensorDataset(torch.rand(args.batch_size * args.steps, 3, 32, 32))
    trainer = Trainer()
    for (images,) in DataLoader(data, batch_size=args.batch_size):
        loss = trainer.step(images)
    print(float(loss))
