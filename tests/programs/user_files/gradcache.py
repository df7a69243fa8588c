"""Train two text towers contrastively on a large batch: embeddings first, then gradients chunk by chunk."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda")


class Tower(nn.Module):
    def __init__(self, words=8_000, width=384, depth=4):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.project = nn.Linear(width, 256)

    def forward(self, tokens):
        return F.normalize(self.project(self.encoder(self.embed(tokens)).mean(1)), dim=-1)


class Contrastive:
    def __init__(self, chunk=32):
        self.towers = nn.ModuleList([Tower(), Tower()]).to(device)
        self.optimizer = torch.optim.AdamW(self.towers.parameters(), lr=1e-4)
        self.chunk = chunk

    def step(self, queries, documents):
        chunks = [one.to(device).split(self.chunk) for one in (queries, documents)]
        with torch.no_grad():
            sides = [
                torch.cat([tower(part) for part in parts])
                for tower, parts in zip(self.towers, chunks, strict=True)
            ]
        sides = [side.requires_grad_() for side in sides]
        scores = sides[0] @ sides[1].t() / 0.05
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=device))
        loss.backward()
        self.optimizer.zero_grad()
        for tower, parts, side in zip(self.towers, chunks, sides, strict=True):
            for part, gradient in zip(parts, side.grad.split(self.chunk), strict=True):
                tower(part).backward(gradient)
        self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    training = Contrastive()
    for _ in range(args.steps):
        training.step(*(torch.randint(0, 8_000, (args.batch_size, 64)) for _ in range(2)))


if __name__ == "__main__":
    main()
