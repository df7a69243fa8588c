"""Models that published memory measurements used and that no library provides.

Python variables in `forward` decide when memory is freed, so every `forward` here holds exactly the tensors
that the original held.
"""

from typing import Any

from torch import Tensor, cat, nn
from torch.nn import Identity as Identity, functional


class CNN(nn.Module):
    """An image classifier with one convolution and one linear layer.

    A 3x3 convolution to 8 channels, 2x2 average pooling, and a linear layer to `classes` scores.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, kernel_size=3)
        self.pool = nn.AvgPool2d(kernel_size=2, stride=2)
        self.fc = nn.Linear(8 * ((height - 2) // 2) * ((width - 2) // 2), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.pool(x)
        x = x.view(x.size(0), -1)
        return self.fc(x)  # type: ignore[no-any-return]


class ConvPair(nn.Module):
    """Two convolutions in a row, with 1, 16 and 32 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(1, 16, kernel_size=3, padding=5)
        self.conv1 = nn.Conv2d(16, 32, kernel_size=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1(self.conv0(x))  # type: ignore[no-any-return]


class _DoubleConv(nn.Module):
    """Two blocks of convolution, batch norm and ReLU. The convolutions are 3x3 and keep the resolution."""

    def __init__(self, in_channels: int, out_channels: int, *, inplace_relu: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=inplace_relu),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=inplace_relu),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _downsample(in_channels: int, out_channels: int, *, inplace_relu: bool) -> nn.Sequential:
    """Return layers that halve the resolution by max pooling and apply a `_DoubleConv`."""
    return nn.Sequential(nn.MaxPool2d(2), _DoubleConv(in_channels, out_channels, inplace_relu=inplace_relu))


class _Upsample(nn.Module):
    """A U-Net block that doubles the resolution and joins the encoder's features.

    It ends with a `_DoubleConv`.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _DoubleConv(in_channels + out_channels, out_channels, inplace_relu=False)

    def forward(self, deep: Tensor, skipped: Tensor) -> Tensor:
        deep = functional.interpolate(deep, scale_factor=2, mode="nearest")
        rows, columns = skipped.size(2) - deep.size(2), skipped.size(3) - deep.size(3)
        # Padding by zero elements still copies the tensor, as in the original.
        deep = functional.pad(deep, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        joined = cat([skipped, deep], dim=1)
        return self.conv(joined)  # type: ignore[no-any-return]


class BasicEncoder(nn.Module):
    """The U-Net's encoder, with in-place ReLU. It returns the features of all four resolutions."""

    inplace_relu = True

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.initial_layer = _DoubleConv(in_channels, 64, inplace_relu=self.inplace_relu)
        self.down1 = _downsample(64, 128, inplace_relu=self.inplace_relu)
        self.down2 = _downsample(128, 256, inplace_relu=self.inplace_relu)
        self.down3 = _downsample(256, 512, inplace_relu=self.inplace_relu)

    def forward(self, x: Tensor) -> Any:
        x1 = self.initial_layer(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        return x1, x2, x3, x4


class BasicUNet(BasicEncoder):
    """A U-Net of four resolutions, with a sigmoid at its end.

    It has 64 to 512 channels, and takes images of any size.
    """

    inplace_relu = False

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels)
        self.up2 = _Upsample(512, 256)
        self.up3 = _Upsample(256, 128)
        self.up4 = _Upsample(128, 64)
        self.hidden = nn.Identity()
        self.final_layer = nn.Conv2d(64, out_channels, kernel_size=1)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Any:
        return self.sigmoid(self.final_layer(self.features(x)))

    def features(self, x: Tensor) -> Any:
        """Return the last features before the output layer.

        They have 64 channels at the input's resolution.
        """
        full, half, quarter, eighth = super().forward(x)
        x = self.up2(eighth, quarter)
        x = self.up3(x, half)
        x = self.up4(x, full)
        return self.hidden(x)


class Davenet(nn.Module):
    """The audio branch of DAVEnet.

    It takes spectrograms [batch, 40, frames] and gives features [batch, 1024, frames / 16]. Source: Harwath
    et al. 2018, "Jointly Discovering Visual Objects and Spoken Words from Raw Sensory Input".
    """

    def __init__(self) -> None:
        super().__init__()
        self.batchnorm1 = nn.BatchNorm2d(1)
        self.conv1 = nn.Conv2d(1, 128, kernel_size=(40, 1))
        self.conv2 = nn.Conv2d(128, 256, kernel_size=(1, 11), padding=(0, 5))
        self.conv3 = nn.Conv2d(256, 512, kernel_size=(1, 17), padding=(0, 8))
        self.conv4 = nn.Conv2d(512, 512, kernel_size=(1, 17), padding=(0, 8))
        self.conv5 = nn.Conv2d(512, 1024, kernel_size=(1, 17), padding=(0, 8))
        self.pool = nn.MaxPool2d(kernel_size=(1, 3), stride=(1, 2), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.batchnorm1(x.unsqueeze(1))
        x = functional.relu(self.conv1(x))
        for conv in (self.conv2, self.conv3, self.conv4, self.conv5):
            x = functional.relu(conv(x))
            x = self.pool(x)
        return x.squeeze(2)


class DavenetImage(nn.Module):
    """The image branch of DAVEnet.

    It is VGG16's features with a 3x3 convolution in place of the last pooling. Takes [batch, 3, height,
    width], gives [batch, 1024, height / 16, width / 16]. Source as for `Davenet`.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
            for channels in stage:
                layers += [nn.Conv2d(before, channels, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
                before = channels
            layers.append(nn.MaxPool2d(kernel_size=2))
        layers[-1] = nn.Conv2d(before, 1024, kernel_size=3, padding=1)
        self.image_model = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.image_model(x)  # type: ignore[no-any-return]
