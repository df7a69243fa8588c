"""As much of a GPU as decides which kernels run and what they take."""

from dataclasses import dataclass

from planner.program.convolution import Answer


@dataclass(frozen=True, slots=True)
class Chip:
    """What a rule may know of a GPU."""

    capability: tuple[int, int]
    multiprocessors: int
    cudnn: Answer | None = None  # what takes the workspaces of convolutions; None: as published runs show


# The largest card of each compute capability, by NVIDIA's data sheets: V100, TITAN RTX, A100, A40 and
# A6000, RTX 6000 Ada, H100 SXM, B200, RTX PRO 6000.
_MULTIPROCESSORS = {
    (7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188,
}  # fmt: skip


def chip_of(capability: tuple[int, int], multiprocessors: int | None = None) -> Chip:
    """The chip; where nobody knows its multiprocessors, those of the largest card, which take most scratch
    memory, or of an A100.
    """
    return Chip(capability, multiprocessors or _MULTIPROCESSORS.get(capability, 108))
