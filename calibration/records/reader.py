"""Read the measuring script's records as observations and histories.

A folder of records has versions.json and any of peaks.jsonl, limits.jsonl and history.jsonl.gz, with one
JSON object per line. Jobs that the planner cannot express yet are skipped with the reason, and so is a last
line that a killed run left unfinished. Any other error raises a DataFileError with its line.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from calibration.records.jobs import HISTORY_STEPS, PEAK_STEPS, RecordedJob, UnsupportedJobError
from planner._support.bounded_read import open_regular, read_bytes
from planner._support.conversion import Count, Positive, Text, decode_json
from planner._support.versions import format_cudnn_version
from planner.allocator.history import ACTIONS, History, HistoryEvent, HistoryMark
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration import Observation, Settings, Versions, origin_of
from planner.jobs import Job, Mode
from planner.program import Phase

GIB = 2**30
LARGEST_FILE_BYTES = 2**33  # on the disk; lines are read one by one
LONGEST_LINE = 2**28  # characters; a history of three steps takes 10**6
PHASES = {"model": Phase.SETUP, "forward": Phase.FORWARD, "backward": Phase.BACKWARD, "step": Phase.OPTIMIZER}

R = TypeVar("R")
T = TypeVar("T")


class SkippedRecord(NamedTuple):
    """A skipped record, with the reason."""

    file: str
    line: int
    reason: str


class HistoryRecord(Struct, frozen=True):
    """An allocator history of a job at a batch size."""

    job: Job
    batch: int
    history: History


class MeasuredRecords(Struct, frozen=True):
    """The observations, histories and skipped records of a folder of records."""

    observations: tuple[Observation, ...]  # of peaks.jsonl, and every probe of limits.jsonl
    histories: tuple[HistoryRecord, ...]
    skipped: tuple[SkippedRecord, ...]


class _Machine(Struct, frozen=True):
    """The GPU, the versions of libraries, and the settings of the measuring machine, from versions.json."""

    gpu: Text
    torch: Text
    cuda: Text
    cudnn: int
    driver: Text | None
    capability: tuple[int, int]
    total_torch: Count
    nvml_total: int  # -1 without NVML
    tf32_matmul: bool
    tf32_cudnn: bool

    @property
    def versions(self) -> Versions:
        return Versions(
            torch=self.torch,
            cuda=self.cuda,
            cudnn=format_cudnn_version(self.cudnn),
            driver=self.driver,
            capability=self.capability,
            torch_total_bytes=self.total_torch,
            nvml_total_bytes=None if self.nvml_total == -1 else self.nvml_total,
        )


class _Peaks(Struct, frozen=True):
    oom: bool
    retries: Count
    peak_allocated: Count
    peak_reserved: Count
    total_nvml: int  # -1 without NVML
    context: int
    used_after: list[int]  # after each step, of the device
    process_after: list[int]  # of the process; -1 if NVML does not show it
    allocated_after: list[int]
    reserved_after: list[int]

    @property
    def process_levels(self) -> list[int]:
        """Return the GPU memory after each step, of the process or else of the device, or [] without NVML.

        Sizes are in bytes. The memory of the device is returned if NVML does not show the process.
        """
        if self.process_after and min(self.process_after) > 0:
            return self.process_after
        return self.used_after if self.total_nvml != -1 else []


class _ProbePeaks(Struct, frozen=True):
    peak_allocated: Count
    peak_reserved: Count
    retries: Count


class _Limits(Struct, frozen=True):
    probes: list[tuple[Positive, bool, _ProbePeaks]]  # batch, whether it ran, peaks


class _History(Struct, frozen=True):
    events: tuple[HistoryEvent, ...]
    marks: list[tuple[str, Count]]  # a phase with its step, and the number of events before it


class _Record(Struct, Generic[R], frozen=True):
    """One line of a file of records: a job, its batch size or (limits.jsonl) cap in GiB, and the result."""

    job: RecordedJob
    arg: Positive
    result: R


def read_measured_records(folder: Path) -> MeasuredRecords:
    """Read a folder of records, and return its observations, histories and skipped records.

    Raises DataFileError.
    """
    path = folder / "versions.json"
    try:
        machine = decode_json(read_bytes(path, LONGEST_LINE), _Machine)
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"{path}: {error}; the file names the GPU that was measured") from error
    skipped: list[SkippedRecord] = []

    def read(name: str, kind: Any, convert: Callable[[_Machine, Any, str], list[T]]) -> list[T]:
        return _read(folder / name, kind, skipped, partial(convert, machine))

    peaks = read("peaks.jsonl", _Record[_Peaks], _of_peaks)
    limits = read("limits.jsonl", _Record[_Limits], _of_limits)
    histories = read("history.jsonl.gz", _Record[_History], _of_history)
    return MeasuredRecords((*peaks, *limits), tuple(histories), tuple(skipped))


def _read(
    path: Path, kind: Any, skipped: list[SkippedRecord], convert: Callable[[Any, str], list[T]]
) -> list[T]:
    if not path.exists():
        return []
    results: list[T] = []
    when = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    number = 0
    try:
        for number, line in _lines(path):
            if line is None:
                skipped.append(SkippedRecord(path.name, number, "the line is cut short"))
                break
            try:
                results += convert(decode_json(line, kind), when)
            except UnsupportedJobError as reason:
                skipped.append(SkippedRecord(path.name, number, str(reason)))
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, OverflowError, RecursionError, UsageError, zlib.error) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path} line {number}: {problem}; remove the line") from error
    return results


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, bytes) for each line of a file; the bytes are None for a last line that is cut short."""
    with (
        open_regular(path, LARGEST_FILE_BYTES) as plain,
        gzip.open(plain, "rb") if path.suffix == ".gz" else nullcontext(plain) as file,
    ):
        for number in count(1):
            try:
                line = file.readline(LONGEST_LINE)
            except EOFError:  # the end of the last member is missing
                line = b"cut"
            if not line:
                return
            yield number, line if line.endswith(b"\n") else None


def _of_peaks(machine: _Machine, record: _Record[_Peaks], when: str) -> list[Observation]:
    result, levels = record.result, record.result.process_levels
    reserved, allocated = result.reserved_after, result.allocated_after
    return [
        Observation(
            **_circumstances(machine, record, when),
            batch=record.arg,
            peak_allocated_bytes=result.peak_allocated,
            peak_reserved_bytes=result.peak_reserved,
            end_allocated_bytes=allocated[-1] if allocated and not result.oom else None,
            # Read after each step: after retries or a failure, this is not the peak.
            process_peak_bytes=max(levels) if levels and result.retries == 0 and not result.oom else None,
            context_before_bytes=result.context if result.total_nvml != -1 else None,
            context_after_bytes=levels[2] - reserved[2] if min(len(levels), len(reserved)) >= 3 else None,
            retries=result.retries,
            oom=result.oom,
        )
    ]


def _of_limits(machine: _Machine, record: _Record[_Limits], when: str) -> list[Observation]:
    return [
        Observation(
            **_circumstances(machine, record, when, record.arg * GIB),
            batch=batch,
            peak_allocated_bytes=peaks.peak_allocated,
            peak_reserved_bytes=peaks.peak_reserved,
            retries=peaks.retries,
            oom=not ran,
        )
        for batch, ran, peaks in record.result.probes
    ]


def _circumstances(
    machine: _Machine, record: _Record[Any], when: str, cap_bytes: int | None = None
) -> dict[str, Any]:
    """Return the job, GPU, versions, settings, source and date of an observation, by field name."""
    job, options = record.job.convert(PEAK_STEPS), record.job.alloc_conf
    return {
        "job": job,
        "gpu": machine.gpu,
        "versions": machine.versions,
        "settings": Settings(machine.tf32_matmul, machine.tf32_cudnn, options, cap_bytes),
        "source": origin_of(machine.gpu),
        # The script's loop copies the target in inference too; the planner's loop does not.
        "about": "the target was on the device too" if job.loop.mode is Mode.INFER else "",
        "when": when,
    }


def _of_history(machine: _Machine, record: _Record[_History], when: str) -> list[HistoryRecord]:
    job, events = record.job.convert(HISTORY_STEPS), record.result.events
    unknown = {event.action for event in events} - set(ACTIONS)
    if unknown:
        raise ValueError(f"unknown action {min(unknown)!r}")
    marks = tuple(_marks(record.result.marks, events))
    history = History(
        machine.gpu, machine.torch, record.job.alloc_conf, machine.total_torch, None, events, marks
    )
    return [HistoryRecord(job, record.arg, history)]


def _marks(marks: list[tuple[str, int]], events: tuple[HistoryEvent, ...]) -> Iterator[HistoryMark]:
    """Yield the script's phase marks as the planner's marks.

    Their steps are numbered from 1, and their positions counted in allocations. The script numbers steps from
    0, and counts positions in events. Marks of phases that are not in `PHASES` are dropped.
    """
    for name, index in marks:
        word = name.rstrip("0123456789")
        if word in PHASES:
            allocations = sum(event.action == "alloc" for event in events[:index])
            step = int(name[len(word) :]) + 1 if word != name else 0
            yield HistoryMark(0 if word == "model" else allocations, step, PHASES[word])
