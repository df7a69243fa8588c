"""Volumes in half precision, whose convolutions torch 2.9 runs without cuDNN, as the plan says."""

import pytest
from torch import nn

from planner.jobs import MemoryFormat, Mode, Precision
from planner.program import Alloc, Category
from tests.helpers.models import job_of, trace_of

# The columns of a sample: 27 voxels of 4 channels at each of 10 x 10 x 10 positions, of two bytes.
COLUMNS_BYTES = 4 * 27 * 1000 * 2
VOLUME, IMAGE = "4x10x10x10", "4x10x10"


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.AMP_FP16])
def test_columns_of_a_volume_are_planned_and_named(precision: Precision) -> None:
    """In both passes, as PyTorch's own kernels take them; the note says which cuDNN does without."""
    job = job_of(VOLUME, torch="2.9", precision=precision, mode=Mode.TRAIN)
    trace = trace_of(
        lambda: nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)), job, 2
    )
    columns = [
        event
        for event in trace.events
        if isinstance(event, Alloc)
        and (event.size_bytes, event.category) == (COLUMNS_BYTES, Category.WORKSPACE)
    ]
    assert len(columns) == 4
    (note,) = (note for note in trace.notes if "without cuDNN" in note)
    assert note.startswith("torch 2.9 runs three-dimensional convolutions in half precision without cuDNN")
    assert "with cuDNN 9.15 or newer in its place, cuDNN runs them" in note


@pytest.mark.parametrize(
    ("version", "precision", "kernel", "size", "memory_format"),
    [
        ("2.8", Precision.BF16, 3, VOLUME, MemoryFormat.CONTIGUOUS),
        ("2.10", Precision.BF16, 3, VOLUME, MemoryFormat.CONTIGUOUS),
        ("2.9", Precision.FP32, 3, VOLUME, MemoryFormat.CONTIGUOUS),
        ("2.9", Precision.BF16, 1, VOLUME, MemoryFormat.CONTIGUOUS),
        ("2.9", Precision.BF16, 3, VOLUME, MemoryFormat.CHANNELS_LAST),
        ("2.9", Precision.BF16, 3, IMAGE, MemoryFormat.CONTIGUOUS),
    ],
)
def test_cudnn_runs_all_others(
    version: str, precision: Precision, kernel: int, size: str, memory_format: MemoryFormat
) -> None:
    """Other versions, single precision, kernels of a voxel, channels last, and images."""
    kind = nn.Conv2d if size == IMAGE else nn.Conv3d
    job = job_of(size, torch=version, precision=precision, memory_format=memory_format)
    trace = trace_of(lambda: kind(4, 4, kernel, padding=kernel // 2), job, 2)
    assert not any("without cuDNN" in note for note in trace.notes)
    assert all(event.category is not Category.WORKSPACE for event in trace.events if isinstance(event, Alloc))
