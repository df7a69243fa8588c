"""Train a perceptron by a CUDA graph of the whole step, captured at the first batch."""

import argparse

import torch
from torch import nn


class Trainer:
    def __init__(self, width=4096):
        self.net = nn.Sequential(
            nn.Linear(512, width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(width, 100),
        ).to("cuda:0")
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-4, capturable=True)
        self.graph = None

    def update(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.net(self.static_x), self.static_y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def capture(self, x, y):
        self.static_x, self.static_y = x.cuda(), y.cuda()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.update()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.static_loss = self.update()

    def step(self, batch):
        x, y = batch
        if self.graph is None:
            self.capture(x, y)
        self.static_x.copy_(x, non_blocking=True)
        self.static_y.copy_(y, non_blocking=True)
        self.graph.replay()
        return self.static_loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    trainer = Trainer()
    for _ in range(args.steps):
        x = torch.randn(args.batch_size, 512).pin_memory()
        y = torch.randint(0, 100, (args.batch_size,)).pin_memory()
        trainer.step((x, y))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
