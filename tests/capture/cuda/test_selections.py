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
        lambda x: x.take(_zeros(x[0, :3])),
        lambda x: x.masked_select(torch.arange(WIDTH, device=x.device) < 3),
        lambda x: x.topk(2)[0],
        lambda x: x.max(1)[0],
        lambda x: x.median(1, keepdim=True)[0],
        lambda x: x.sort()[0],
        lambda x: x.cummax(1)[0],
        lambda x: x.trace(),
    ],
    ids=[
        "gather",
        "index_select",
        "take",
        "masked_select",
        "topk",
        "max",
        "median",
        "sort",
        "cummax",
        "trace",
    ],
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


@pytest.mark.parametrize(
    ("choose", "masks"),
    [
        (lambda x: x.max(), 2),  # NaN, and the elements that equal the result
        (lambda x: x.median(), 2),
        (lambda x: x.clamp(torch.zeros_like(x[0]), torch.ones_like(x[0])), 2),  # one for each bound
    ],
    ids=["max", "median", "clamp"],
)
def test_the_gradient_of_an_extreme_joins_masks_in_place(
    choose: Callable[[Tensor], Tensor], masks: int
) -> None:
    """torch on meta would join two masks into a third."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(BATCH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return choose(self.bias + x)

    trace = trace_of(Chooses, job_of(f"{WIDTH}", mode=Mode.TRAIN), BATCH)
    assert _made(trace, Phase.BACKWARD).count(BATCH * WIDTH) == masks


def _made(trace: Trace, phase: Phase) -> list[int]:
    """Return the sizes of the blocks that a phase makes."""
    sizes, now = [], None
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.phase
        elif isinstance(event, Alloc) and now is phase:
            sizes.append(event.size_bytes)
    return sizes
