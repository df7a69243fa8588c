"""Any record of an allocator's history as the differ takes it: our files, snapshots, measuring records."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from calibration.records.reader import HistoryRecord, read_measured_records
from planner.allocator import config_of_torch, parse_alloc_conf
from planner.allocator.history import (
    History,
    RecordedBlock,
    RecordedMark,
    Recording,
    load_history,
    load_snapshot,
)
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration import is_same_job
from planner.jobs import Job

_PICKLE = b"\x80"  # how every pickle of protocol 2 or later begins
_RECORDS = "history.jsonl.gz"  # of the measuring script, in a folder with others


def load_recording(path: Path, job: Job, batch: int) -> Recording:
    """Read a history for the differ.

    `path` is a file of ours, a pickle of `torch.cuda.memory._snapshot()`, or a folder of the measuring script
    or its history.jsonl.gz, which holds several: the one of this job and batch size is taken. Raises
    DataFileError, or UsageError where the folder has none.
    """
    if path.is_dir() or path.name == _RECORDS:
        folder = path if path.is_dir() else path.parent
        record = _choose(path, read_measured_records(folder).histories, job, batch)
        return recording_of(record.history, str(path))
    try:
        with path.open("rb") as file:
            first = file.read(1)
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the history: {error.strerror or error}") from error
    if first == _PICKLE:
        snapshot = load_snapshot(path)
        return recording_of(snapshot.history, str(path), snapshot.where, snapshot.notes)
    return recording_of(load_history(path), str(path))


def recording_of(
    history: History, source: str, where: Sequence[str] = (), notes: Sequence[str] = ()
) -> Recording:
    """Return a history as a recording. Raises UsageError for allocator options that are not simulated."""
    births: list[tuple[int, str]] = []
    deaths: dict[int, int] = {}
    live: dict[int, int] = {}  # address -> birth
    reserved = highest = strangers = 0
    for index, event in enumerate(history.events):
        if event.action == "alloc" and event.size_bytes > 0:
            live[event.address] = len(births)
            births.append((event.size_bytes, where[index] if where else ""))
        elif event.action == "free_completed":
            birth = live.pop(event.address, None)
            strangers += birth is None
            if birth is not None:
                deaths[birth] = len(births)
        elif event.action in ("segment_alloc", "segment_map"):
            reserved += event.size_bytes
            highest = max(highest, reserved)
        elif event.action in ("segment_free", "segment_unmap"):
            reserved -= event.size_bytes
    blocks = tuple(RecordedBlock(size, deaths.get(index), text) for index, (size, text) in enumerate(births))
    marks = tuple(RecordedMark(mark.allocations, mark.step, mark.phase) for mark in history.marks)
    about = f"{history.gpu}, torch {history.torch}, {source}"
    whole = highest if strangers == 0 and highest else None
    return Recording(
        about,
        parse_alloc_conf(history.alloc_conf, config_of_torch(history.torch)),
        blocks,
        marks,
        whole,
        (*notes, *_notes(blocks, marks, strangers)),
    )


def _notes(blocks: Sequence[RecordedBlock], marks: Sequence[RecordedMark], strangers: int) -> Iterator[str]:
    if not blocks:
        yield "the record tells of no allocation at all"
    if strangers:
        yield (
            f"{strangers} blocks die that were born before the recording began, or whose birth torch had "
            "dropped: record from before the first tensor, with more entries"
        )
    if not marks:
        yield "the record does not say where phases begin, so that it is aligned as one row"


def _choose(path: Path, records: Sequence[HistoryRecord], job: Job, batch: int) -> HistoryRecord:
    matching = [one for one in records if one.batch == batch and is_same_job(one.job, job)]
    if not matching:
        known = sorted({f"{one.job.model} at batch {one.batch}" for one in records})
        listed = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise UsageError(
            f"--against {path}: no history of this job at batch {batch}; it has {listed or 'none at all'}"
        )
    return matching[-1]  # the latest: lines are appended
