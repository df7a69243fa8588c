"""Workspaces of convolutions that published runs with cuDNN before 9.8 show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from planner.jobs import PUBLISHED
from planner.program import Capability, Convolution, ConvWorkspaceSource, Direction, Workspaces

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ImageWise:
    """Weight gradients taken image by image and added up: a workspace of batch size times weights.

    It concerns pointwise convolutions in fp32 whose weights have so many bytes and whose output so few
    positions that a product over one image is cheap beside its result. Above a limit cuDNN takes another
    engine, as does PyTorch where the allocation fails (Conv_v8.cpp).
    """

    least_weight_bytes: int
    most_positions: int
    limit_bytes: int

    def workspace_bytes(self, batch: int, weight_bytes: int, positions: int) -> int:
        """Return the workspace; 0 where the term does not apply.

        >>> ImageWise(2**20, 9, 2**29).workspace_bytes(323, 1280 * 320 * 4, 9) / 2**20
        504.6875
        >>> ImageWise(2**20, 9, 2**29).workspace_bytes(377, 1280 * 320 * 4, 9)
        0
        """
        if weight_bytes < self.least_weight_bytes or positions > self.most_positions:
            return 0
        size_bytes = batch * weight_bytes
        return size_bytes if size_bytes <= self.limit_bytes else 0


# By benchmarks/fits/convolution_workspaces.py, which fits them to published peaks of an RTX 3060 and prints
# between which values each may lie; on an RTX 4060 the same layers take nothing. Other GPUs are not known.
IMAGE_WISE: Mapping[Capability, ImageWise] = {(8, 6): ImageWise(MIB, 9, 512 * MIB)}


@dataclass(frozen=True, slots=True, eq=False)
class PublishedWorkspaces:
    """The one term that published runs of torch 2.6 with cuDNN 9.1 identify; all else counts as empty."""

    terms: Mapping[Capability, ImageWise] = field(default_factory=lambda: IMAGE_WISE)

    @property
    def name(self) -> str:
        """Return the name of this source."""
        return PUBLISHED

    def __call__(self, capability: Capability, sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the term, for pointwise weight gradients in float32."""
        term, w, y = self.terms.get(capability), convolution.w, convolution.y
        is_pointwise = prod(w[2:]) == 1 and len(w) == 4 and w[1] == convolution.x[1]
        is_meant = convolution.direction is Direction.WEIGHT and convolution.dtype == "float32"
        if term is None or not is_pointwise or not is_meant or convolution.channels_last:
            return Workspaces(0)
        return Workspaces(term.workspace_bytes(y[0], 4 * prod(w), prod(y[2:])))

    def source(self, capability: Capability) -> ConvWorkspaceSource:
        """Return that published runs answer."""
        return ConvWorkspaceSource.PUBLISHED

    def notes(self, capability: Capability) -> tuple[str, ...]:
        """Return what the term rests on."""
        return (
            "workspaces of convolutions are one term, fitted to published runs of cuDNN 9.1; newer versions "
            "request more",
        )
