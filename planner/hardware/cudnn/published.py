"""Workspaces of convolutions, inferred from published runs with cuDNN before 9.8."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from planner.jobs import PUBLISHED
from planner.program import (
    Capability,
    Convolution,
    ConvWorkspaceSource,
    Direction,
    WorkspaceAccount,
    Workspaces,
)

# The longest sums that are taken image by image, by benchmarks/fits/convolution_workspaces.py: published runs
# on an RTX 3060 have the workspace with up to 2,907 terms and lack it with 3,393 or more; runs on an RTX 4060
# lack it with 2,241 or more. Other GPUs are not known.
MOST_TERMS: Mapping[Capability, int] = {(8, 6): 3150}
# Channels of x and y for which cuDNN 9.8 does so on compute capability 8.0 as on 8.9 (docs/cudnn.md).
CHANNELS_IN, CHANNELS_OUT = range(48, 449), range(416, 1809)


def image_wise_terms(convolution: Convolution) -> int | None:
    """Return the terms per sum of a weight gradient that cuDNN may take image by image, None for others.

    The gradient of a pointwise convolution is one product that sums over batch x positions, or one product
    for each image, whose results are added up. cuDNN takes one product for each image if the sums are short
    and the channels widen. Its workspace is the weights for each image.
    """
    x, w, y = convolution.x, convolution.w, convolution.y
    is_gradient = convolution.direction is Direction.WEIGHT and convolution.dtype == "float32"
    is_pointwise = len(w) == 4 and prod(w[2:]) == 1 and w[1] == x[1] and x[2:] == y[2:]
    if convolution.channels_last or not is_gradient or not is_pointwise:
        return None
    widens = w[1] in CHANNELS_IN and w[0] in CHANNELS_OUT
    return y[0] * prod(y[2:]) if widens else None


@dataclass(frozen=True, slots=True, eq=False)
class PublishedWorkspaces:
    """A source of convolution workspaces by one formula, which is inferred from published runs.

    Workspaces that the formula does not cover are 0 bytes. The runs had torch 2.6 with cuDNN 9.1.
    """

    most_terms: Mapping[Capability, int] = field(default_factory=lambda: MOST_TERMS)

    @property
    def name(self) -> str:
        """Return the name of this source."""
        return PUBLISHED

    def __call__(self, capability: Capability, sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the weights' bytes times the batch size for image-wise weight gradients, else 0 bytes."""
        terms = image_wise_terms(convolution)
        if terms is None or terms > self.most_terms.get(capability, 0):
            return Workspaces(0)
        return Workspaces(convolution.y[0] * 4 * prod(convolution.w))

    def following(
        self, capability: Capability, sm_count: int, convolution: Convolution, size_bytes: int
    ) -> tuple[int, ...] | None:
        """Return None: the workspace that follows a refused workspace is not known."""
        return None

    def account(self, capability: Capability, sm_count: int) -> WorkspaceAccount:
        """Return an account that names published runs as the source of the workspaces."""
        note = (
            "workspaces of convolutions are one term, fitted to published runs of cuDNN 9.1; newer versions "
            "request more"
        )
        return WorkspaceAccount(ConvWorkspaceSource.PUBLISHED, notes=(note,))
