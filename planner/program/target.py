"""The properties of a GPU that decide which kernels run and what they allocate."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from planner.program.kernels.convolution import Convolution, ConvWorkspaceQuery, Workspaces
from planner.program.torch_version import NEWEST_TORCH, TorchVersion

Capability = tuple[int, int]

# The number of SMs of the largest GPU of each compute capability, by NVIDIA's data sheets: V100, TITAN RTX,
# A100, A40 and A6000, RTX 6000 Ada, H100 SXM, B200, RTX PRO 6000.
_SM_COUNTS = {
    (7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188,
}  # fmt: skip


class SmLimits(NamedTuple):
    """The largest shared memory per block, threads and blocks of a streaming multiprocessor."""

    shared_bytes_per_block: int
    threads: int
    blocks: int


# CUDA Programming Guide, appendix "Compute Capabilities", table of SM resources: resident threads and blocks.
SM_LIMITS: Mapping[Capability, SmLimits] = {
    **dict.fromkeys(((7, 0), (7, 2)), SmLimits(98304, 2048, 32)),
    (7, 5): SmLimits(65536, 1024, 16),
    (8, 0): SmLimits(166912, 2048, 32),
    (8, 6): SmLimits(101376, 1536, 16),
    (8, 7): SmLimits(166912, 1536, 16),
    (8, 9): SmLimits(101376, 1536, 24),
    **dict.fromkeys(((9, 0), (10, 0), (10, 3)), SmLimits(232448, 2048, 32)),
    **dict.fromkeys(((12, 0), (12, 1)), SmLimits(101376, 1536, 24)),
}


def threads_per_sm(capability: Capability) -> int:
    """Return the largest number of resident threads of an SM. It is 2,048 if the capability is not listed."""
    limits = SM_LIMITS.get(capability)
    return 2048 if limits is None else limits.threads


class Target(Struct, frozen=True):
    """The properties of a GPU that workspace rules may use."""

    capability: Capability
    sm_count: int
    conv_workspace_query: ConvWorkspaceQuery | None = None  # convolutions take no workspace if it is None
    torch: TorchVersion = NEWEST_TORCH  # the version that runs the kernels

    @property
    def kind(self) -> tuple[Capability, int]:
        """Return the compute capability and the number of SMs, which decide what torch compiles."""
        return self.capability, self.sm_count

    @classmethod
    def for_capability(cls, capability: Capability, sm_count: int | None = None) -> "Target":
        """Return the target for a compute capability with `sm_count` SMs.

        The default is the number of SMs of the largest GPU of the capability, which takes the most workspace,
        or of an A100 if the capability is not listed.
        """
        return cls(capability, sm_count or _SM_COUNTS.get(capability, 108))

    def conv_workspaces(self, convolution: Convolution) -> Workspaces:
        """Return the workspaces of a convolution on the GPU. They have 0 bytes if there is no query."""
        if self.conv_workspace_query is None:
            return Workspaces(0)
        return self.conv_workspace_query(self.capability, self.sm_count, convolution)
