"""A job that a real GPU recorded, run on an emulated one and held against the record."""

import pytest

from benchmarks.accuracy.recorded import JOBS
from benchmarks.accuracy.recorded_emulated import run_jobs
from tests.helpers.gpu_records import FOLDER, IS_THERE

pytestmark = pytest.mark.emulated


@IS_THERE
def test_attention_has_the_recorded_events_and_peaks(request: pytest.FixtureRequest) -> None:
    """The emulated run requests and frees what the record of the GPU does, and has both its peaks.

    The record is of torch 2.6; the operators of this job request the same in later versions.
    """
    job = next(job for job in JOBS if job.record == "attention-naive-b8x4096x16-fwd-bwd")
    python = str(request.config.getoption("--cuda-python"))
    (row,) = run_jobs([job], FOLDER, python)
    assert row.first_difference == ""
    assert row.emulated == row.recorded == row.matched > 30
    assert row.emulated_allocated_bytes == row.recorded_allocated_bytes
    assert row.emulated_reserved_bytes == row.recorded_reserved_bytes
