"""A message-passing graph network in plain torch: nodes and edges of padded graphs, summed by scatter_add."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NODES, EDGES, FEATURES = 64, 256, 16


class MessagePassing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.update = nn.GRUCell(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes, sources, targets):
        width = nodes.shape[-1]
        senders = nodes.gather(1, sources[..., None].expand(-1, -1, width))
        receivers = nodes.gather(1, targets[..., None].expand(-1, -1, width))
        messages = self.message(torch.cat([senders, receivers], dim=-1))
        total = torch.zeros_like(nodes).scatter_add_(1, targets[..., None].expand_as(messages), messages)
        updated = self.update(total.flatten(0, 1), nodes.flatten(0, 1))
        return self.norm(updated.view_as(nodes))


class GraphNet(nn.Module):
    def __init__(self, width=128, layers=4):
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, features, edges):
        sources, targets = edges.unbind(-1)
        nodes = self.embed(features)
        for layer in self.layers:
            nodes = nodes + layer(nodes, sources, targets)
        return self.head(nodes.mean(1)).squeeze(-1)


device = "cuda" if torch.cuda.is_available() else "cpu"
model = GraphNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)


def train_step(features, edges, target):
    features, edges, target = features.to(device), edges.to(device), target.to(device)
    optimizer.zero_grad()
    loss = nn.functional.huber_loss(model(features, edges), target)
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.detach()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    count = args.batch_size * args.steps
    graphs = TensorDataset(
        torch.rand(count, NODES, FEATURES), torch.randint(NODES, (count, EDGES, 2)), torch.rand(count)
    )
    for batch in DataLoader(graphs, batch_size=args.batch_size):
        loss = train_step(*batch)
    print(float(loss))
