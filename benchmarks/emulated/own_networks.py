"""Convolutional networks as people write them, with the widths, depths and kernels that vary among them."""

import torch
from torch import Tensor, nn


def _block(channels: int, width: int, kernel: int = 3, stride: int = 1, *, norm: bool = True) -> nn.Module:
    normed = [nn.BatchNorm2d(width)] if norm else []
    conv = nn.Conv2d(channels, width, kernel, stride, (kernel - 1) // 2)
    return nn.Sequential(conv, *normed, nn.ReLU(inplace=True))


def classifier(
    channels: int, width: int, depth: int, kernel: int = 3, twice: bool = False, norm: bool = True
) -> nn.Module:
    """Return convolutions, each followed by pooling and a width twice as large, and two linear layers."""
    layers: list[nn.Module] = []
    for level in range(depth):
        own = width * 2**level
        layers.append(_block(channels, own, kernel, norm=norm))
        if twice:
            layers.append(_block(own, own, kernel, norm=norm))
        layers.append(nn.MaxPool2d(2))
        channels = own
    head = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 128), nn.ReLU())
    return nn.Sequential(*layers, *head, nn.Linear(128, 10))


def autoencoder(channels: int, width: int, depth: int, kernel: int = 3, norm: bool = False) -> nn.Module:
    """Return convolutions of stride 2 and as many transposed ones; kernels of 3 or 4."""
    sizes = [channels, *(width * 2**level for level in range(depth))]
    layers: list[nn.Module] = []
    for own, wider in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Conv2d(own, wider, kernel, 2, 1), *([nn.BatchNorm2d(wider)] if norm else [])]
        layers.append(nn.ReLU())
    for wider, own in zip(sizes[:0:-1], sizes[-2::-1], strict=False):
        layers.append(nn.ConvTranspose2d(wider, own, kernel, 2, 1, output_padding=kernel % 2))
        if own != channels:
            layers += [*([nn.BatchNorm2d(own)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Sigmoid())


def generator(channels: int, width: int, depth: int, latent: int = 100) -> nn.Module:
    """Return transposed convolutions that make images of `4 * 2**depth` pixels of a vector, as in DCGAN."""
    own = width * 2 ** (depth - 1)
    layers = [nn.ConvTranspose2d(latent, own, 4, 1, 0, bias=False), nn.BatchNorm2d(own), nn.ReLU(True)]
    for _ in range(depth - 1):
        layers.append(nn.ConvTranspose2d(own, own // 2, 4, 2, 1, bias=False))
        own //= 2
        layers += [nn.BatchNorm2d(own), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(own, channels, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(channels: int, width: int, depth: int) -> nn.Module:
    """Return convolutions of stride 2 and kernel 4 down to one score, as in DCGAN and PatchGAN."""
    layers = [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for _ in range(depth - 1):
        layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width)]
        layers.append(nn.LeakyReLU(0.2, inplace=True))
        width *= 2
    score = (nn.Conv2d(width, 1, 4, 1, 0, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *score)


class UNet(nn.Module):
    """Two convolutions at each level, pooling and transposed convolutions between levels."""

    def __init__(self, channels: int, width: int, depth: int, classes: int = 1) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(self._double, [channels, *sizes], sizes))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * own, own, 2, 2) for own in sizes[:-1])
        self.up = nn.ModuleList(self._double(2 * own, own) for own in sizes[:-1])
        self.out = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(channels: int, width: int) -> nn.Module:
        return nn.Sequential(_block(channels, width), _block(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        skips = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for lift, up, skip in zip(reversed(self.lift), reversed(self.up), reversed(skips), strict=True):
            x = up(torch.cat((lift(x), skip), 1))
        return self.out(x)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _block(channels, width, 3, stride), nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)
        )
        is_same = channels == width and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return torch.relu(self.layers(x) + self.shortcut(x))


def residual_classifier(channels: int, width: int, depth: int, blocks: int = 2) -> nn.Module:
    """Return a residual network for small images, of `blocks` blocks at each width."""
    layers: list[nn.Module] = [_block(channels, width)]
    own = width
    for level in range(depth):
        for block in range(blocks):
            wider = width * 2**level
            layers.append(Residual(own, wider, 2 if level and block == 0 else 1))
            own = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(own, 10))


def restorer(channels: int, width: int, depth: int, kernel: int = 3) -> nn.Module:
    """Return convolutions of one width and extent, as in DnCNN, SRCNN and the heads of EDSR."""
    layers: list[nn.Module] = [_block(channels, width, kernel, norm=False)]
    layers += [_block(width, width) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Conv2d(width, channels, kernel, 1, kernel // 2))


def translator(channels: int, width: int, depth: int) -> nn.Module:
    """Return a generator as in CycleGAN: kernels of 7, two strides, `depth` residual blocks and back."""
    down = [_block(channels, width, 7), _block(width, 2 * width, 3, 2), _block(2 * width, 4 * width, 3, 2)]
    middle = [Residual(4 * width, 4 * width) for _ in range(depth)]
    up: list[nn.Module] = []
    for own in (4 * width, 2 * width):
        up += [nn.ConvTranspose2d(own, own // 2, 3, 2, 1, 1), nn.BatchNorm2d(own // 2), nn.ReLU(True)]
    return nn.Sequential(*down, *middle, *up, nn.Conv2d(width, channels, 7, 1, 3), nn.Tanh())


def sequence_classifier(channels: int, width: int, depth: int, kernel: int = 3) -> nn.Module:
    """Return convolutions over a sequence, each followed by pooling and a width twice as large."""
    layers: list[nn.Module] = []
    for level in range(depth):
        own = width * 2**level
        layers += [nn.Conv1d(channels, own, kernel, padding=kernel // 2), nn.BatchNorm1d(own), nn.ReLU()]
        layers.append(nn.MaxPool1d(2))
        channels = own
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, 10))
