"""Histories that real GPUs recorded, replayed to the last event; skipped where the folder is not there."""

import gzip
import json
import re
from pathlib import Path

import pytest

from benchmarks.accuracy import addresses, event_traces, histories, recorded
from benchmarks.accuracy.histories import OTHER_ORDER, Counts, replay
from benchmarks.rows import read_rows
from planner.allocator.history.published_file import load_published
from tests.helpers.gpu_records import FOLDER, IS_THERE


@IS_THERE
def test_every_recorded_history_is_replayed_to_its_end() -> None:
    """Each block has the recorded address, each change of the segments is the recorded one."""
    results = list(replay(FOLDER, None))
    assert results
    assert {name: difference for name, _, difference, _ in results if difference} == {}


@IS_THERE
def test_the_peaks_of_a_replay_are_the_recorded_ones() -> None:
    """Both peaks that a record states are those of its replay, to the byte."""
    peaks = {name: counts for name, _, _, counts in replay(FOLDER, None)}
    for path in sorted(FOLDER.glob("*.json.gz")):
        record = json.loads(gzip.decompress(path.read_bytes()))
        counts = peaks[load_published(path).name]
        assert counts is not None
        stated = record["peak_allocated"], record["peak_reserved"]
        assert (counts.peak_allocated_bytes, counts.peak_reserved_bytes) == stated, path.name


@IS_THERE
def test_the_rules_of_another_version_do_not_pass() -> None:
    """With the order in which torch 2.12 reuses equal blocks at least a third of the histories differ."""
    results = list(replay(FOLDER, OTHER_ORDER))
    differing = [difference for _, _, difference, _ in results if difference]
    assert len(differing) >= len(results) // 3
    assert all(re.fullmatch(r"event \d+ of \d+: .*", difference) for difference in differing)


@IS_THERE
def test_the_counts_of_the_page_are_those_of_the_folder() -> None:
    """benchmarks/accuracy/histories.csv is what `--counts` writes."""
    found = [counts for *_, counts in replay(FOLDER, None)]
    known = {counts.name: counts for counts in read_rows(histories.COUNTS, Counts)}
    assert known
    assert all(known.get(counts.name, counts) == counts for counts in found if counts is not None)


@IS_THERE
def test_reserved_peaks_do_not_depend_on_the_order_of_addresses() -> None:
    """Replayed with falling addresses, as the product has them, 90 % of the peaks are within 0.5 %."""
    rows = list(addresses.placements(FOLDER))
    near = [row for row in rows if abs(row.falling_bytes / row.recorded_bytes - 1) <= 0.005]
    assert len(near) >= 0.9 * len(rows) > 0
    known = {row.name: row for row in read_rows(addresses.COUNTS, addresses.Placement)}
    assert all(known.get(row.name, row) == row for row in rows)


@IS_THERE
@pytest.mark.parametrize("job", recorded.JOBS[:7], ids=lambda job: job.record)
def test_a_recorded_job_is_planned_event_by_event(job: recorded.RecordedJob) -> None:
    """The plan has the recorded allocations in their order and sizes, each freed where the record has it."""
    row = recorded.compare(job, FOLDER)
    assert row.is_identical
    assert row.planned_reserved_bytes == row.recorded_reserved_bytes
    assert row.planned_allocated_bytes == pytest.approx(row.recorded_allocated_bytes, rel=0.005)
    assert row in read_rows(recorded.COUNTS, recorded.Comparison)


def test_cards_are_named_without_the_reasons() -> None:
    """A GPU that is only confined by a record is called not named, an inferred one inferred."""
    assert histories.card_of("NVIDIA GeForce RTX 4060 Ti (nsys reports)") == "NVIDIA GeForce RTX 4060 Ti"
    assert histories.card_of("NVIDIA H100 80GB (inferred: 32 MiB)") == "NVIDIA H100 80GB, inferred"
    assert histories.card_of("unknown (cuBLAS workspace of 8.5 MiB)") == "not named"
    assert (
        histories.card_of("unknown: compute capability 9.0 (32 MiB), 21,476 MiB")
        == "not named, compute capability 9.0"
    )


def test_a_folder_without_histories_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder is wrong usage; a file that is no history does not agree."""
    monkeypatch.setattr("sys.argv", ["histories", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        histories.main()
    assert caught.value.code == 2
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"{}"))
    assert histories.main() == 1
    assert capsys.readouterr().out.endswith("0 of 1 agree\n")


@IS_THERE
def test_a_profiled_step_has_each_planned_tensor() -> None:
    """Those of the smallest trace, in order and with nothing else between them."""
    row = event_traces.compare(event_traces.JOBS[0], FOLDER.parent / "event_traces")
    assert row in read_rows(event_traces.COUNTS, event_traces.Comparison)
    assert (row.found, row.others) == (row.tensors, 0)


def test_each_planned_tensor_was_found_in_its_trace() -> None:
    """No row of the page lacks one."""
    rows = read_rows(event_traces.COUNTS, event_traces.Comparison)
    assert [row.trace for row in rows] == [job.trace for job in event_traces.JOBS]
    assert all(row.found == row.tensors > 0 for row in rows)
