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


class Separable(nn.Module):
    """A gated pair of 1x1 and depthwise convolutions beside a shortcut, as in NAFNet and Restormer."""

    def __init__(self, width: int, expansion: float, parts: int = 1) -> None:
        super().__init__()
        inner = parts * int(width * expansion)
        self.parts = parts
        self.expand = nn.Conv2d(width, inner, 1, bias=False)
        self.depthwise = nn.Conv2d(inner, inner, 3, 1, 1, groups=inner, bias=False)
        self.project = nn.Conv2d(inner // parts, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both, the first of the parts gated by the others."""
        parts = self.depthwise(self.expand(x)).chunk(self.parts, 1)
        gated = parts[0]
        for part in parts[1:]:
            gated = gated * part
        return x + self.project(gated)


class SeparableUNet(nn.Module):
    """Separable blocks at each level with pixel shuffles between levels, as in image restoration."""

    def __init__(
        self, channels: int, width: int, depth: int, expansions: tuple[tuple[float, int], ...]
    ) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.first = nn.Conv2d(channels, width, 3, 1, 1)
        self.down = nn.ModuleList(self._blocks(size, expansions) for size in sizes)
        self.shrink = nn.ModuleList(nn.Conv2d(size, size // 2, 3, 1, 1, bias=False) for size in sizes[:-1])
        self.grow = nn.ModuleList(nn.Conv2d(2 * size, 4 * size, 3, 1, 1, bias=False) for size in sizes[:-1])
        self.join = nn.ModuleList(nn.Conv2d(2 * size, size, 1, bias=False) for size in sizes[:-1])
        self.up = nn.ModuleList(self._blocks(size, expansions) for size in sizes[:-1])
        self.last = nn.Conv2d(width, channels, 3, 1, 1)

    @staticmethod
    def _blocks(width: int, expansions: tuple[tuple[float, int], ...]) -> nn.Module:
        return nn.Sequential(*(Separable(width, *expansion) for expansion in expansions))

    def forward(self, x: Tensor) -> Tensor:
        """Return the restored image."""
        own, skips = self.first(x), []
        for down, shrink in zip(self.down, self.shrink, strict=False):
            skips.append(down(own))
            own = nn.functional.pixel_unshuffle(shrink(skips[-1]), 2)
        own = self.down[-1](own)
        for grow, join, up, skip in zip(
            reversed(self.grow), reversed(self.join), reversed(self.up), reversed(skips), strict=True
        ):
            own = up(join(torch.cat((nn.functional.pixel_shuffle(grow(own), 2), skip), 1)))
        return self.last(own) + x


def gated_restorer(channels: int, width: int, depth: int) -> nn.Module:
    """Return a restorer whose blocks double their channels and multiply the halves, as in NAFNet."""
    return SeparableUNet(channels, width, depth, ((1.0, 2),))


def transposed_restorer(channels: int, width: int, depth: int) -> nn.Module:
    """Return a restorer with triple channels for attention and 2.66 times as many twice, as in Restormer."""
    return SeparableUNet(channels, width, depth, ((1.0, 3), (2.66, 2)))


class Stage(nn.Module):
    """A convolution of stride 2, and blocks of two convolutions on half of its channels, as in YOLO's C2f."""

    def __init__(self, channels: int, width: int, blocks: int, stride: int = 2) -> None:
        super().__init__()
        self.down = _block(channels, width, 3, stride)
        self.split = _block(width, width, 1)
        half = width // 2
        self.blocks = nn.ModuleList(
            nn.Sequential(_block(half, half), _block(half, half)) for _ in range(blocks)
        )
        self.join = _block((2 + blocks) * half, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined outputs of all blocks."""
        parts = list(self.split(self.down(x)).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.join(torch.cat(parts, 1))


class Detector(nn.Module):
    """Five strides with stages on the last four, and heads on the last three, as in YOLO."""

    def __init__(self, channels: int, width: int, blocks: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(5)]
        self.first = _block(channels, width, 3, 2)
        self.stages = nn.ModuleList(
            Stage(own, wider, blocks) for own, wider in zip(sizes, sizes[1:], strict=False)
        )
        self.boxes = nn.ModuleList(self._head(size, max(16, width), 64) for size in sizes[2:])
        self.classes = nn.ModuleList(self._head(size, 4 * width, 80) for size in sizes[2:])

    @staticmethod
    def _head(width: int, inner: int, outputs: int) -> nn.Module:
        return nn.Sequential(_block(width, inner), _block(inner, inner), nn.Conv2d(inner, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return boxes and classes of all positions."""
        own, found = self.first(x), []
        for stage in self.stages:
            own = stage(own)
            found.append(own)
        heads = zip(found[1:], self.boxes, self.classes, strict=True)
        return torch.cat([torch.cat((box(own), kind(own)), 1).flatten(2) for own, box, kind in heads], 2)


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
