"""Operators on meta tensors, and the steps of their workspace rules."""

from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.ops import Op, Output, Outputs, answer_convolutions
from planner.capture.workspaces.registry import RULES
from planner.hardware.cudnn import PublishedWorkspaces
from planner.program.target import Target
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace

aten = torch.ops.aten
REST, OUTPUT = Outputs(), Output()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def index(*shape: int) -> Tensor:
    """A contiguous tensor of indices."""
    return meta(*shape, dtype=torch.int64)


def last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in the channels-last format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return meta(*shape, dtype=dtype).to(memory_format=formats[len(shape)])


def steps(func: Any, *args: Any, out: Any = None, capability: tuple[int, int] = AMPERE) -> tuple[Op, ...]:
    """Return the ops of a rule for these arguments; the result is torch's own where it is not given.

    Convolutions have the workspaces of published runs.
    """
    result = func(*args) if out is None else out
    target = replace(Target.for_capability(capability), conv_workspace_query=PublishedWorkspaces())
    return answer_convolutions(tuple(RULES[func](args, result, target)), target)


# ---- copies of a convolution's operands, as an allocator recorded them with torch 2.13 on an emulated GPU

X, W, Y = (4, 16, 20, 20), (32, 16, 3, 3), (4, 32, 20, 20)
X_BYTES, W_BYTES, Y_BYTES = 102_400, 18_432, 204_800


def crossed(batch: int, channels: int, height: int, width: int) -> Tensor:
    """A tensor in neither format."""
    return meta(batch, height, channels, width).transpose(1, 2)
