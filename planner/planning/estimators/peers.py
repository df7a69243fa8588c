"""The memory estimates of other tools, in bytes and in the unit that each tool prints."""

from collections.abc import Callable
from typing import Any

import msgspec

from planner.jobs import Job

MEGABYTE_BYTES = 10**6
MEBIBYTE_BYTES = 2**20

Build = Callable[[Job], Any]  # returns an nn.Module with parameters on the meta device


class PeerEstimate(msgspec.Struct, frozen=True):
    """The estimate of another tool in bytes, by the tool's own categories."""

    parts: tuple[tuple[str, int], ...]
    unit_bytes: int = MEBIBYTE_BYTES  # the tool's megabyte

    @property
    def total_bytes(self) -> int:
        """Return the tool's estimate in bytes, the sum of its parts."""
        return sum(size_bytes for _, size_bytes in self.parts)


def sum_of_layers(input_bytes: int, output_bytes: int, parameter_bytes: int, unit_bytes: int) -> PeerEstimate:
    """Return an estimate with three parts: input, outputs of the layers, and parameters.

    torchinfo and other tools compute it in this way. `output_bytes` are the outputs of the layers, for the
    forward and the backward pass.
    """
    outputs, parameters = ("Forward and backward", output_bytes), ("Parameters", parameter_bytes)
    return PeerEstimate((("Input", input_bytes), outputs, parameters), unit_bytes)
