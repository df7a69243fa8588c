"""Staging blocks of copies between GPU and CPU, as ATen/native/cuda/Copy.cu makes them."""

import pytest
import torch
from torch import Tensor, nn

from planner.jobs import Job, Mode
from planner.program.events import Alloc, Category, Trace
from tests.helpers.models import job_of, trace_of

ROWS, WIDTH = 3, 40


def job() -> Job:
    """One step in eval mode, whose input has 6 x 40 floats a sample."""
    return job_of(f"6x{WIDTH}", mode=Mode.INFER, steps=1)


def staged(trace: Trace) -> list[int]:
    """The bytes of blocks that no tensor holds, in order."""
    return [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and event.category is Category.WORKSPACE
    ]


class Copying(nn.Module):
    """Run a copy of the test on the input."""

    def __init__(self, copy: str) -> None:
        super().__init__()
        self.copy = copy

    def forward(self, x: Tensor) -> Tensor:
        host = torch.empty(x.shape, device="cpu", pin_memory=True)
        images = torch.zeros(ROWS, 4, 5, 6, device="cuda").to(memory_format=torch.channels_last)
        match self.copy:
            case "contiguous to the CPU":
                host.copy_(x)
            case "transposed to the CPU":
                host.transpose(1, 2).copy_(x.transpose(1, 2))
            case "transposed into another layout":
                torch.empty(ROWS, WIDTH, 6, device="cpu", pin_memory=True).copy_(x.transpose(1, 2))
            case "slice to the CPU":
                x[:, :, ::2].cpu()
            case "broadcast to the CPU":
                host.copy_(x[:, :1])
            case "half to the CPU":
                x.to("cpu", torch.float16)
            case "half to the CPU, not blocking":
                x.to("cpu", torch.float16, non_blocking=True)
            case "half from the CPU":
                host.to("cuda", torch.float16)
            case "half from the CPU, not blocking":
                host.to("cuda", torch.float16, non_blocking=True)
            case "into channels last":
                images.copy_(torch.empty(ROWS, 4, 5, 6, device="cpu", pin_memory=True))
        return x + 1


WHOLE = ROWS * 6 * WIDTH * 4


@pytest.mark.parametrize(
    ("copy", "blocks"),
    [
        ("contiguous to the CPU", []),
        ("transposed to the CPU", []),
        ("transposed into another layout", [WHOLE]),
        ("slice to the CPU", [WHOLE // 2]),
        ("broadcast to the CPU", [WHOLE]),
        ("half to the CPU", []),
        ("half to the CPU, not blocking", [WHOLE // 2]),
        ("half from the CPU", []),
        ("half from the CPU, not blocking", [WHOLE]),
        ("into channels last", [ROWS * 4 * 5 * 6 * 4]),
    ],
)
def test_copies_take_staging_blocks_where_they_are_no_single_transfer(copy: str, blocks: list[int]) -> None:
    """Other layouts are made contiguous on the GPU; types change on the CPU where the copy blocks."""
    assert staged(trace_of(lambda: Copying(copy), job(), ROWS)) == blocks
