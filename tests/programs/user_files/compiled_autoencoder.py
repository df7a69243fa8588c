"""Train a convolutional autoencoder whose model the script compiles itself, with CUDA graphs."""

import argparse

import torch
from torch import nn


class Trainer:
    def __init__(self, width=64):
        self.model = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.GroupNorm(8, 2 * width),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
            nn.Sigmoid(),
        ).cuda()
        self.compiled = torch.compile(self.model, mode="reduce-overhead")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self, images):
        images = images.cuda()
        loss = nn.functional.mse_loss(self.compiled(images), images)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    trainer = Trainer()
    for _ in range(args.steps):
        print(trainer.step(torch.rand(args.batch_size, 3, 64, 64)))
