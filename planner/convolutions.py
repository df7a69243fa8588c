"""Convolutions as a library sees them, and what it says it would take for one."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Direction(StrEnum):
    FORWARD = "forward"
    DATA = "data gradient"
    WEIGHT = "weight gradient"


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call; the forward pass of a transposed convolution is the data gradient of another."""

    direction: Direction
    dtype: str  # float32, float64, float16 or bfloat16
    x: tuple[int, ...]  # N, C, then two or three extents
    w: tuple[int, ...]  # K, C / groups, then the kernel's extents
    y: tuple[int, ...]  # N, K, then the output's extents
    channels_last: bool
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workspaces:
    """What the library takes for a call, in bytes."""

    workspace_bytes: int
    searched_bytes: int = 0  # more than that, the first time, while it times all its ways


Answer = Callable[[tuple[int, int], int, Convolution], Workspaces]  # compute capability, multiprocessors
