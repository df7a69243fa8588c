"""A stand-in of the library of nnU-Net's networks, of a few layers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NETWORKS = '''
from torch import nn


class Net(nn.Module):
    """Two scales of a network: at the whole patch and at half of it."""

    def __init__(self, input_channels, num_classes, deep_supervision, strides, conv_op):
        super().__init__()
        self.whole = conv_op(input_channels, num_classes, 3, padding=1)
        self.small = conv_op(input_channels, num_classes, 3, stride=2, padding=1)

    def forward(self, x):
        return [self.whole(x), self.small(x)]


class Stages(nn.Module):
    """A convolution for each stage, and its classes at each scale but the smallest."""

    def __init__(self, input_channels, num_classes, strides, conv_op, features_per_stage, **_):
        super().__init__()
        widths = [input_channels, *features_per_stage]
        self.stages = nn.ModuleList(
            conv_op(before, after, 3, stride=stride, padding=1)
            for before, after, stride in zip(widths, features_per_stage, strides)
        )
        self.heads = nn.ModuleList(conv_op(width, num_classes, 1) for width in features_per_stage)

    def forward(self, x):
        scales = []
        for stage, head in zip(self.stages, self.heads):
            x = stage(x)
            scales.append(head(x))
        return scales[:-1]
'''


@contextmanager
def nnunet_library(folder: Path) -> Iterator[None]:
    """Let `dynamic_network_architectures.net` be importable, and take it out of the modules again."""
    package = folder / "dynamic_network_architectures"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text(NETWORKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name in _loaded():
            patch.delitem(sys.modules, name)
        yield
        for name in _loaded():  # other tests ask whether the library is installed
            del sys.modules[name]


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.startswith("dynamic_network_architectures")]
