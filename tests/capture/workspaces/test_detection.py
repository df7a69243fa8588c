"""Workspaces of detectors' kernels, on shapes whose bytes are written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.capture.session import record
from planner.capture.workspaces.ops import Hold, Op, Outputs, Release
from planner.capture.workspaces.registry import is_unknown, rule_of
from planner.capture.workspaces.tensor.sorting import radix_sort_bytes
from planner.jobs import resolve_job
from planner.program.events import Alloc, Category
from planner.program.target import Target
from tests.helpers.models import AMPERE, born, job_of, trace_of

CHIP = Target(AMPERE, 84)
aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def steps(func: Any, out: Tensor, *args: Any) -> tuple[Op, ...]:
    rule = rule_of(func)
    assert rule is not None
    return tuple(rule(args, out, CHIP))


@pytest.mark.parametrize(
    ("many", "sort"),
    [
        (1000, [8 * 1000]),  # in place, beside 0, 1, 2, ...
        (5000, [Hold(8 * 5000), radix_sort_bytes(5000, 4, 8, CHIP)]),
    ],
)
def test_suppression_keeps_a_bit_for_each_pair(many: int, sort: list[Op]) -> None:
    """The order, the boxes in it, a bit for each pair in words of 64, and the indices that come back."""
    func, boxes_left = torch.ops.torchvision.nms.default, meta(7, dtype=torch.int64)
    words = {1000: 16, 5000: 79}[many]
    assert steps(func, boxes_left, meta(many, 4), meta(many), 0.5) == (
        Hold(8 * many),
        Hold(4 * many),
        *sort,
        Release(len(sort)),
        Hold(16 * many),
        Hold(8 * many * words),
        Hold(8 * 7),
        Outputs(),
    )
    assert steps(func, boxes_left[:0], meta(0, 4), meta(0), 0.5) == ()


def test_regions_are_read_from_contiguous_images() -> None:
    """An image with its channels last is copied; the gradient is read as it lies."""
    ops = torch.ops.torchvision
    image, rois = meta(2, 8, 16, 16), meta(10, 5)
    last = image.to(memory_format=torch.channels_last)
    out = meta(10, 8, 7, 7)
    rest = (1.0, 7, 7, 2, False)
    assert steps(ops.roi_align.default, out, image, rois, *rest) == (Outputs(),)
    assert steps(ops.roi_align.default, out, last, rois, *rest) == (Outputs(), Hold(2 * 8 * 16 * 16 * 4))
    back = (1.0, 7, 7, 2, 8, 16, 16, 2, False)
    assert steps(ops._roi_align_backward.default, image, out, rois, *back) == (Outputs(),)


def test_finding_what_is_not_zero() -> None:
    """A count before the result, a selection after it, each with a little storage of CUB."""
    positions = meta(3, 2, dtype=torch.int64)
    assert steps(aten.nonzero.default, positions, meta(1000, 1000)) == (
        Hold(4),
        4 * 245,
        Outputs(),
        8 * (32 + 489),
    )
    assert steps(aten.nonzero.default, positions[:0], meta(0, 2)) == ()


def test_columns_of_indices_have_no_gaps() -> None:
    """`nonzero` of CUDA lays one column after the other, so a column needs no copy to be contiguous."""

    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows, columns = torch.ones(3, 4, device=x.device).nonzero(as_tuple=True)
            return x.new_zeros(2 if rows.is_contiguous() and columns.is_contiguous() else 1)

    assert born(trace_of(Rows, job_of("4"), 2), "new_zeros") == [8]


def test_nothing_of_a_detector_is_unknown_but_convolutions() -> None:
    """Each operator of a training step has a rule or is declared free, and masks of bits are seen."""
    taken = record(resolve_job("torchvision:fasterrcnn_mobilenet_v3_large_320_fpn", {}), 2, AMPERE)
    assert [op for op in taken.unknown_ops if "convolution" not in op] == []
    sites = taken.sites
    of_nms = [
        event.size_bytes
        for event in taken.events
        if isinstance(event, Alloc) and event.category is Category.WORKSPACE and "nms" in sites[event.site].op
    ]
    assert max(of_nms) > 100_000
    assert not is_unknown(torch.ops.torchvision.nms.default)
