"""BYOL: an online and a target network, no negatives."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet50


def mlp(dim, projection_size=256, hidden_size=1024):
    return nn.Sequential(
        nn.Linear(dim, hidden_size),
        nn.BatchNorm1d(hidden_size),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_size, projection_size),
    )


def regression_loss(x, y):
    x, y = F.normalize(x, dim=-1, p=2), F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


def set_requires_grad(module, val):
    for p in module.parameters():
        p.requires_grad = val


class BYOL:
    def __init__(self, image_channels=3, tau=0.99, lr=3e-4, device="cuda"):
        self.device, self.tau = device, tau
        net = resnet50(weights=None)
        net.fc = mlp(net.fc.in_features)
        self.online = net.to(device)
        self.predictor = mlp(256).to(device)
        self.target = copy.deepcopy(self.online)
        set_requires_grad(self.target, False)
        self.opt = torch.optim.Adam([*self.online.parameters(), *self.predictor.parameters()], lr=lr)

    @torch.no_grad()
    def update_target(self):
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data.mul_(self.tau).add_(online.data, alpha=1 - self.tau)

    def step(self, batch):
        one, two = batch
        one, two = one.to(self.device), two.to(self.device)
        online_one, online_two = self.predictor(self.online(one)), self.predictor(self.online(two))
        with torch.no_grad():
            target_one, target_two = self.target(one), self.target(two)
        loss = regression_loss(online_one, target_two.detach()) + regression_loss(
            online_two, target_one.detach()
        )
        loss = loss.mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.update_target()
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    x = torch.rand(args.batch_size * args.steps, 3, 96, 96)
    loader = DataLoader(TensorDataset(x, x.flip(-1)), batch_size=args.batch_size, shuffle=True)
    learner = BYOL()
    losses = []
    for batch in loader:
        loss = learner.step(batch)
        losses.append(loss.item())
    print(losses)


if __name__ == "__main__":
    main()
