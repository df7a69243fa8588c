"""Train a text classifier whose encoder is a graphed callable and whose head runs eagerly."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        n, length, width = x.shape
        parts = self.attention(self.norms[0](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norms[1](x))


class Classifier:
    def __init__(self, words=20_000, width=512, depth=6):
        self.embedding = nn.Embedding(words, width).cuda()
        self.encoder = nn.Sequential(*[Block(width, 8) for _ in range(depth)]).cuda()
        self.head = nn.Linear(width, 20).cuda()
        parts = (self.embedding, self.encoder, self.head)
        self.optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()], lr=1e-4)
        self.graphed = None

    def step(self, tokens, labels):
        tokens, labels = tokens.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        x = self.embedding(tokens)
        if self.graphed is None:
            sample = torch.randn_like(x, requires_grad=True)
            self.graphed = torch.cuda.make_graphed_callables(self.encoder, (sample,))
        loss = F.cross_entropy(self.head(self.graphed(x).mean(1)), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    trainer = Classifier()
    for _ in range(args.steps):
        tokens = torch.randint(0, 20_000, (args.batch_size, 128))
        trainer.step(tokens, torch.randint(0, 20, (args.batch_size,)))


if __name__ == "__main__":
    main()
