"""Emulated runs of jobs that real GPUs recorded: how they are compared, and the rows of the table."""

import re

import pytest

from benchmarks.accuracy import recorded, recorded_emulated
from benchmarks.accuracy.recorded_emulated import Comparison, compare, find_first_difference, order_of
from benchmarks.rows import read_rows
from planner.allocator.blocks import BlockState, SegmentState
from planner.allocator.history import History, HistoryEvent, recording_of

FIRST = HistoryEvent("alloc", 0x1000, 1000)
SECOND = HistoryEvent("alloc", 0x2000, 4)
FREE = HistoryEvent("free_completed", 0x1000, 1024)


def _history(*events: HistoryEvent, start: tuple[SegmentState, ...] = ()) -> History:
    return History("GPU 0", "2.6.0", "", None, None, events, start=start)


@pytest.mark.parametrize(
    ("places", "order"), [((2, 1, 3, 0), "falling"), ((1, 2, 3, 0), "rising"), ((), "falling")]
)
def test_segments_lie_as_most_of_the_record_do(places: tuple[int, ...], order: str) -> None:
    """The direction of most new segments decides, and no segments leave the product's order."""
    events = (HistoryEvent("segment_alloc", 2**21 * place, 2**21) for place in places)
    assert order_of(_history(*events)) == order


@pytest.mark.parametrize(
    ("emulated", "words"),
    [
        ((FIRST, FREE, SECOND), ""),
        ((FIRST._replace(size_bytes=1001), FREE, SECOND), "allocation 0, .*: 1,001 bytes emulated, 1,000 "),
        ((FIRST, SECOND, FREE), "allocation 0, .*: freed before 2 emulated, 1 recorded"),
        ((FIRST, FREE), "allocation 1: none emulated, 4 bytes recorded"),
        ((FIRST, FREE, SECOND, SECOND), "allocation 2: 4 bytes emulated, none recorded"),
    ],
)
def test_the_first_difference_is_named(emulated: tuple[HistoryEvent, ...], words: str) -> None:
    """Requested bytes count, though they round alike, and so does the place of a free."""
    sides = (_history(*emulated), _history(FIRST, FREE, SECOND))
    found = find_first_difference(*(recording_of(side, "") for side in sides))
    assert re.fullmatch(f"{words}.*" if words else "", found)


def test_blocks_older_than_the_record_count_at_the_first_allocation() -> None:
    """Those that are freed before it do not: the record may begin before or after that."""
    blocks = tuple(BlockState(0x100000 + at, 2**20, in_use=at == 0) for at in (0, 2**20))
    start = (SegmentState(0x100000, 2**21, "small", blocks),)
    freed = HistoryEvent("free_completed", 0x100000, 2**20)
    request = HistoryEvent("alloc", 0x100000, 512)
    row = compare(
        recorded.JOBS[0], "2.4.1", _history(freed, request, start=start), _history(request, start=start)
    )
    assert (row.emulated_start_bytes, row.recorded_start_bytes) == (0, 2**20)


def test_every_job_was_emulated_with_the_version_of_its_record() -> None:
    """Each emulated run requests and frees what the record does, from the same bytes in use on."""
    rows = {row.record: row for row in read_rows(recorded_emulated.COUNTS, Comparison)}
    jobs = [job for job in recorded.JOBS if job.is_emulated]
    assert [*rows] == [job.record for job in jobs]
    for job in jobs:
        row = rows[job.record]
        assert row.torch.startswith(f"{job.torch}."), job.record
        assert row.first_difference == "", job.record
        assert row.emulated == row.matched == row.recorded, job.record
        assert row.emulated_start_bytes == row.recorded_start_bytes, job.record


def test_plan_and_emulated_run_are_held_against_one_record() -> None:
    """Both tables have the record's allocations and peaks."""
    plans = {row.record: row for row in read_rows(recorded.COUNTS, recorded.Comparison)}
    for run in read_rows(recorded_emulated.COUNTS, Comparison):
        plan = plans[run.record]
        assert (run.card, run.recorded) == (plan.card, plan.recorded)
        assert run.recorded_allocated_bytes == plan.recorded_allocated_bytes
        assert run.recorded_reserved_bytes == plan.recorded_reserved_bytes
