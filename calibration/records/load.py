"""Load recorded allocator histories, in any known file format."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from calibration.records.reader import LARGEST_FILE_BYTES, HistoryRecord, read_measured_records
from planner._support.bounded_read import open_regular
from planner.allocator.history import History, Recording, load_any_history, load_snapshot, recording_of
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration import is_same_job
from planner.jobs import Job

_PICKLE = b"\x80"  # the first byte of every pickle of protocol 2 or later
_RECORDS = "history.jsonl.gz"  # of the measuring script, in a folder with other files


def load_recording(path: Path, job: Job, batch: int) -> Recording:
    """Load a recorded allocator history, to compare it with a simulation.

    `path` is a history file written by the planner or published, a pickle of
    `torch.cuda.memory._snapshot()`, or a folder of the measuring script or its history.jsonl.gz. Of the
    histories of the measuring script, the latest of the job and batch size is taken. A history that names no
    version of torch, as a pickle, is taken as of the job's. Raises DataFileError, or UsageError if no history
    of the measuring script matches.
    """
    if path.is_dir() or path.name == _RECORDS:
        folder = path if path.is_dir() else path.parent
        record = _choose(path, read_measured_records(folder).histories, job, batch)
        return recording_of(record.history, str(path))
    try:
        with open_regular(path, LARGEST_FILE_BYTES) as file:
            first = file.read(1)
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the history: {error.strerror or error}") from error
    history = load_snapshot(path) if first == _PICKLE else load_any_history(path)
    return recording_of(_with_version(history, job.environment.torch), str(path))


def _with_version(history: History, version: str) -> History:
    """Return a history with a version of torch if it names none; "" is no version."""
    return replace(history, torch=version) if version and history.torch == "unknown" else history


def _choose(path: Path, records: Sequence[HistoryRecord], job: Job, batch: int) -> HistoryRecord:
    matching = [one for one in records if one.batch == batch and is_same_job(one.job, job)]
    if not matching:
        names = sorted({f"{one.job.model.name} at batch {one.batch}" for one in records})
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise UsageError(
            f"--against {path}: no history of this job at batch {batch}; it has {listed or 'none at all'}"
        )
    return matching[-1]  # the latest: lines are appended
