"""Gradients of selections are one tensor of the input's size, into which a GPU writes in place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.jobs import Mode
from planner.program.events import Alloc, Phase, PhaseStart, Trace
from tests.helpers.models import job_of, trace_of

BATCH, WIDTH = 512, 512
INPUT_BYTES = BATCH * WIDTH * 4


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.int64, device=x.device)


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x.gather(1, _zeros(x[:, :3])),
        lambda x: x.index_select(1, _zeros(x[0, :3])),
        lambda x: x.masked_select(torch.arange(WIDTH, device=x.device) < 3),
        lambda x: x.topk(2)[0],
        lambda x: x.max(1)[0],
        lambda x: x.median(1, keepdim=True)[0],
        lambda x: x.sort()[0],
        lambda x: x.cummax(1)[0],
        lambda x: x.trace(),
    ],
    ids=["gather", "index_select", "masked_select", "topk", "max", "median", "sort", "cummax", "trace"],
)
def test_the_gradient_of_a_selection_is_one_tensor(select: Callable[[Tensor], Tensor]) -> None:
    """Zeros are all that the backward pass makes of the input's size: a GPU scatters into them, where torch
    on meta would scatter into a copy.
    """

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(BATCH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return select(self.bias + x)

    trace = trace_of(Selects, job_of(f"{WIDTH}", mode=Mode.TRAIN), BATCH)
    assert _made(trace, Phase.BACKWARD).count(INPUT_BYTES) == 1


def _made(trace: Trace, phase: Phase) -> list[int]:
    """Return the sizes of the blocks that a phase makes."""
    sizes, now = [], None
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.phase
        elif isinstance(event, Alloc) and now is phase:
            sizes.append(event.size_bytes)
    return sizes
