"""Allocator histories recorded on an NVIDIA GPU, replayed through the simulator byte for byte."""

from pathlib import Path

import pytest

from calibration.probe.client import ProbeRequest, measure
from planner.allocator.config import MIB
from planner.allocator.history.check import check_history
from planner.allocator.history.file import LARGEST_FILE_BYTES, load_history
from planner.allocator.history.history import SEGMENT_SIGNS
from planner.jobs.files.catalogue import load_catalogue
from planner.program.events import Phase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("model", "batch", "alloc_conf", "cap_bytes"),
    [
        ("cnn", 64, "", None),
        ("resnet50", 32, "", None),
        ("vit_b_16", 16, "", None),
        ("vgg16_bn", 16, "", None),
        ("resnet50", 32, "max_split_size_mb:64", None),
        ("resnet50", 32, "roundup_power2_divisions:4", None),
        ("resnet50", 32, "expandable_segments:True", None),
        ("resnet50", 64, "", 4096 * MIB),
    ],
)
def test_a_recorded_history_replays_without_a_difference(
    tmp_path: Path, model: str, batch: int, alloc_conf: str, cap_bytes: int | None
) -> None:
    """Every segment event and every block's place of three real steps is what the simulator does, and so are
    the peaks.
    """
    path = tmp_path / "run.history.json.gz"
    job = load_catalogue()[model].job
    seen = measure(ProbeRequest(job, batch, cap_bytes, alloc_conf, history=path))
    history = load_history(path)
    check = check_history(history)
    assert check.difference is None
    assert check.segment_events == sum(event.action in SEGMENT_SIGNS for event in history.events) > 0
    assert check.peak_allocated_bytes == seen.peak_allocated_bytes
    assert check.peak_reserved_bytes == seen.peak_reserved_bytes
    assert path.stat().st_size < LARGEST_FILE_BYTES // 16


def test_a_history_knows_the_phases_of_its_loop(tmp_path: Path) -> None:
    """Marks are those of three steps, in order, and the batch is copied after the model is placed."""
    path = tmp_path / "run.history.json.gz"
    measure(ProbeRequest(load_catalogue()["cnn"].job, 32, history=path))
    marks = load_history(path).marks
    step = [Phase.INPUTS, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert [mark.phase for mark in marks] == [Phase.SETUP, *step * 3, Phase.END]
    assert [mark.allocations for mark in marks] == sorted(mark.allocations for mark in marks)
    assert marks[0].allocations == 0 < marks[1].allocations
