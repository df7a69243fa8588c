"""Train a network that paints photographs in one style, by the features of a fixed VGG-16."""

import argparse

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda:0")
mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(-1, 1, 1)
deviation = torch.tensor([0.229, 0.224, 0.225], device=device).view(-1, 1, 1)


def block(inner, outer, stride=1):
    layers = [nn.Conv2d(inner, outer, 3, stride, 1), nn.InstanceNorm2d(outer, affine=True), nn.ReLU()]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(block(width, width), nn.Conv2d(width, width, 3, 1, 1))

    def forward(self, x):
        return x + self.body(x)


class Painter(nn.Sequential):
    def __init__(self):
        super().__init__(
            block(3, 32),
            block(32, 64, 2),
            block(64, 128, 2),
            *[Residual(128) for _ in range(5)],
            nn.Upsample(scale_factor=2),
            block(128, 64),
            nn.Upsample(scale_factor=2),
            block(64, 32),
            nn.Conv2d(32, 3, 9, 1, 4),
            nn.Sigmoid(),
        )


class Features(nn.Module):
    def __init__(self, at=(3, 8, 15, 22)):
        super().__init__()
        self.layers = torchvision.models.vgg16(weights=None).features[: max(at) + 1].eval()
        self.at = at
        self.requires_grad_(False)

    def forward(self, x):
        found = []
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in self.at:
                found.append(x)
        return found


def gram(features):
    n, channels, height, width = features.shape
    flat = features.view(n, channels, height * width)
    return flat @ flat.transpose(1, 2) / (channels * height * width)


painter = Painter().to(device)
features = Features().to(device)
optimizer = torch.optim.Adam(painter.parameters(), lr=1e-3)
targets = [torch.zeros(width, width).to(device) * 0.5 for width in (64, 128, 256, 512)]


def train_step(images):
    images = images.to(device)
    painted = painter(images)
    made = features((painted - mean) / deviation)
    with torch.no_grad():
        content = features((images - mean) / deviation)[1]
    loss = 1e5 * F.mse_loss(made[1], content)
    for one, target in zip(made, targets, strict=True):
        loss = loss + 1e10 * F.mse_loss(gram(one), target.expand(len(images), -1, -1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    for _ in range(args.steps):
        train_step(torch.rand(args.batch_size, 3, 256, 256))


if __name__ == "__main__":
    main()
