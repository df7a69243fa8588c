"""The properties of a GPU that decide which kernels run and what they allocate."""

from dataclasses import dataclass

from planner.program.convolution import ConvWorkspaceQuery

Capability = tuple[int, int]

# The largest GPU of each compute capability, by NVIDIA's data sheets: V100, TITAN RTX, A100, A40 and
# A6000, RTX 6000 Ada, H100 SXM, B200, RTX PRO 6000.
_SM_COUNTS = {
    (7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """The properties of a GPU that workspace rules may use."""

    capability: Capability
    sm_count: int
    conv_workspace_query: ConvWorkspaceQuery | None = None  # None: convolutions as published runs show them

    @classmethod
    def for_capability(cls, capability: Capability, sm_count: int | None = None) -> "Target":
        """Return the target of a compute capability.

        Without `sm_count`, that of the largest such GPU, which takes most workspace, or of an A100.
        """
        return cls(capability, sm_count or _SM_COUNTS.get(capability, 108))
