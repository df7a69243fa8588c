"""The records of the self-contained measuring script, as observations and histories, so that none is lost.

A folder of such records has versions.json and any of peaks.jsonl, limits.jsonl, ops.jsonl.gz and
history.jsonl.gz, one JSON object a line. What our jobs cannot say yet is set aside with its reason; so is a
last line that a killed run left unfinished. Anything else that is broken is a DataFileError with its line.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from calibration.records.jobs import (
    HISTORY_STEPS,
    PEAK_STEPS,
    NotOursError,
    check_measured_job,
    job_of_measured,
)
from planner._support.cudnn_version import cudnn_text
from planner.allocator.history import ACTIONS, History, HistoryEvent, HistoryMark
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration import Observation, Settings, Versions, origin_of
from planner.jobs import Job, Mode
from planner.program import Phase

GIB = 2**30
LONGEST_LINE = 2**28  # characters; a history of three steps takes 10**6
PHASES = {"model": Phase.SETUP, "forward": Phase.FORWARD, "backward": Phase.BACKWARD, "step": Phase.OPTIMIZER}

T = TypeVar("T")


class SetAside(NamedTuple):
    """A record that is not used."""

    file: str
    line: int
    reason: str


class OpCall(NamedTuple):
    """One operator of a step: what stood before, after and at most within it, in allocated bytes."""

    where: str  # "forward1", "backward1", ...
    op: str
    inputs: list[Any]  # [shape, dtype, strides] of each tensor
    scalars: list[Any]
    outputs: list[Any]
    before_bytes: int
    after_bytes: int
    highest_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """What the operator took and gave back."""
        return self.highest_bytes - max(self.before_bytes, self.after_bytes)


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """An allocator history and what was run."""

    job: Job
    batch: int
    history: History


@dataclass(frozen=True, slots=True)
class OpsRecord:
    """The operators of a step and what was run, in the words of the record."""

    job: Mapping[str, Any]
    batch: int
    calls: tuple[OpCall, ...]


@dataclass(frozen=True, slots=True)
class MeasuredRecords:
    """All that a folder holds."""

    observations: tuple[Observation, ...]  # of peaks.jsonl, and every probe of limits.jsonl
    histories: tuple[HistoryRecord, ...]
    ops: tuple[OpsRecord, ...]
    set_aside: tuple[SetAside, ...]


@dataclass(frozen=True, slots=True)
class _Machine:
    gpu: str
    versions: Versions
    matmul_tf32: bool
    cudnn_tf32: bool


def read_measured_records(folder: Path) -> MeasuredRecords:
    """All records of a folder. Raises DataFileError."""
    machine = _read_machine(folder / "versions.json")
    aside: list[SetAside] = []
    peaks = _read(folder / "peaks.jsonl", aside, lambda record, when: [_peaks(record, machine, when)])
    limits = _read(folder / "limits.jsonl", aside, lambda record, when: _limits(record, machine, when))
    histories = _read(folder / "history.jsonl.gz", aside, lambda record, when: [_history(record, machine)])
    ops = _read(folder / "ops.jsonl.gz", aside, lambda record, when: [_ops(record)])
    return MeasuredRecords((*peaks, *limits), tuple(histories), tuple(ops), tuple(aside))


def _read(path: Path, aside: list[SetAside], read: Callable[[dict[str, Any], str], list[T]]) -> list[T]:
    if not path.exists():
        return []
    found: list[T] = []
    when = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    number = 0
    try:
        for number, line in _lines(path):
            if line is None:
                aside.append(SetAside(path.name, number, "the line is cut short"))
                break
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("result"), dict):
                raise ValueError("no record with a result")
            try:
                found += read(record, when)
            except NotOursError as reason:
                aside.append(SetAside(path.name, number, str(reason)))
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (
        *(ValueError, TypeError, LookupError, AttributeError, OverflowError),
        *(RecursionError, UsageError, zlib.error),
    ) as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataFileError(f"{path} line {number}: {problem}; remove the line") from error
    return found


def _lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Each line with its number; None for a last one without an end."""
    number = 0
    packed = path.suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as file:
        while True:
            number += 1
            try:
                line = file.readline(LONGEST_LINE)
            except EOFError:  # the end of the last member is missing
                line = "cut"
            if not line:
                return
            if not line.endswith("\n"):
                yield number, None
                return
            yield number, line


def _read_machine(path: Path) -> _Machine:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        capability = tuple(said["capability"])
        if len(capability) != 2:
            raise ValueError("no compute capability: nothing was measured on a GPU")
        versions = Versions(
            torch=_is(said["torch"], str),
            cuda=_is(said["cuda"], str),
            cudnn=cudnn_text(_is(said["cudnn"], int)),
            driver=_is(said["driver"], str) if said["driver"] is not None else None,
            capability=(_is(capability[0], int), _is(capability[1], int)),
            torch_total_bytes=_is(said["total_torch"], int),
            nvml_total_bytes=_seen(said["nvml_total"]),
        )
        gpu = _is(said["gpu"], str)
        return _Machine(gpu, versions, _is(said["tf32_matmul"], bool), _is(said["tf32_cudnn"], bool))
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise DataFileError(f"{path}: {type(error).__name__}: {error}; it names the GPU") from error


def _peaks(record: dict[str, Any], machine: _Machine, when: str) -> Observation:
    job = check_measured_job(record["job"])
    result = record["result"]
    ours = job_of_measured(job, PEAK_STEPS)
    oom, retries = _is(result["oom"], bool), _is(result["retries"], int)
    levels = _process_levels(result)
    reserved, allocated = (_whole(result[key]) for key in ("reserved_after", "allocated_after"))
    return Observation(
        job=ours,
        batch=_is(record["arg"], int),
        gpu=machine.gpu,
        versions=machine.versions,
        settings=_settings(job, machine, None),
        peak_allocated_bytes=_is(result["peak_allocated"], int),
        peak_reserved_bytes=_is(result["peak_reserved"], int),
        end_allocated_bytes=allocated[-1] if allocated and not oom else None,
        # Read after each step: with retries in between, or a death, that is not the peak.
        process_peak_bytes=max(levels) if levels and retries == 0 and not oom else None,
        context_before_bytes=_is(result["context"], int) if result["total_nvml"] != -1 else None,
        context_after_bytes=levels[2] - reserved[2] if min(len(levels), len(reserved)) >= 3 else None,
        retries=retries,
        oom=oom,
        source=origin_of(machine.gpu),
        about=_about(ours),
        when=when,
    )


def _process_levels(result: Mapping[str, Any]) -> list[int]:
    """The process's memory after each step: its own where NVML shows it, else the device's rise."""
    own, device = _whole(result["process_after"]), _whole(result["used_after"])
    if own and min(own) > 0:
        return own
    return device if result["total_nvml"] != -1 else []


def _limits(record: dict[str, Any], machine: _Machine, when: str) -> list[Observation]:
    job = check_measured_job(record["job"])
    ours = job_of_measured(job, PEAK_STEPS)
    settings = _settings(job, machine, _is(record["arg"], int) * GIB)
    return [
        Observation(
            job=ours,
            batch=_is(batch, int),
            gpu=machine.gpu,
            versions=machine.versions,
            settings=settings,
            peak_allocated_bytes=_is(peaks["peak_allocated"], int),
            peak_reserved_bytes=_is(peaks["peak_reserved"], int),
            end_allocated_bytes=None,
            process_peak_bytes=None,
            context_before_bytes=None,
            context_after_bytes=None,
            retries=_is(peaks["retries"], int),
            oom=not _is(lived, bool),
            source=origin_of(machine.gpu),
            about=_about(ours),
            when=when,
        )
        for batch, lived, peaks in record["result"]["probes"]
    ]


def _history(record: dict[str, Any], machine: _Machine) -> HistoryRecord:
    job = check_measured_job(record["job"])
    ours = job_of_measured(job, HISTORY_STEPS)
    events = tuple(
        HistoryEvent(_is(action, str), _is(address, int), _is(size_bytes, int))
        for action, address, size_bytes in record["result"]["events"]
    )
    unknown = {event.action for event in events} - set(ACTIONS)
    if unknown:
        raise ValueError(f"unknown action {min(unknown)!r}")
    marks = _marks(record["result"]["marks"], events)
    total = machine.versions.torch_total_bytes
    torch = machine.versions.torch
    history = History(machine.gpu, torch, job["alloc_conf"], total, None, events, marks)
    return HistoryRecord(ours, _is(record["arg"], int), history)


def _marks(said: list[Any], events: tuple[HistoryEvent, ...]) -> tuple[HistoryMark, ...]:
    """The script counts steps from 0 and all events; the model is on the device where we begin step 1."""
    marks = []
    for name, index in said:
        word, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
        if word not in PHASES:
            continue
        allocations = sum(event.action == "alloc" for event in events[: _is(index, int)])
        step = int(number) + 1 if number else 0
        marks.append(HistoryMark(0 if word == "model" else allocations, step, PHASES[word]))
    return tuple(marks)


def _ops(record: dict[str, Any]) -> OpsRecord:
    calls = []
    for row in record["result"]["rows"]:
        call = OpCall(*row)
        for figure in call[-3:]:
            _is(figure, int)
        calls.append(call)
    return OpsRecord(check_measured_job(record["job"]), _is(record["arg"], int), tuple(calls))


def _settings(job: Mapping[str, Any], machine: _Machine, cap_bytes: int | None) -> Settings:
    return Settings(
        machine.matmul_tf32,
        machine.cudnn_tf32,
        job["alloc_conf"],
        allocator_cap_bytes=cap_bytes,
    )


def _about(job: Job) -> str:
    """The script's loop copies the target to the device in inference too, which ours does not."""
    return "the target was on the device too" if job.mode is Mode.INFER else ""


def _is(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
    return value


def _whole(values: Any) -> list[int]:
    return [_is(value, int) for value in _is(values, list)]


def _seen(value: Any) -> int | None:
    return None if value == -1 else _is(value, int)
