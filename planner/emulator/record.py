"""Records of a command that ran on emulated GPUs: one of each process, and what they say together."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner._support.versions import format_cudnn_version
from planner.emulator.history import History
from planner.errors import DataFileError
from planner.program import Outcome


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most memory that one GPU held in a span of time, in bytes."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int  # context and everything reserved, as nvidia-smi shows it


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Optimizer steps in a row with the same peaks."""

    first: int
    last: int
    peaks: Peaks


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The place at which an allocation failed."""

    step: int  # the optimizer step that was not reached
    phase: str  # "backward", or "" where that is not known
    module: str  # dotted name, "" where no module was running
    line: str  # FILE:LINE of the script, "" where none was on the stack
    requested_bytes: int
    was_raised: bool  # it ended the process


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """One process on one GPU."""

    rank: int
    pid: int
    device: int
    steps: tuple[StepPeaks, ...]
    after_steps: Peaks | None  # what came after the last optimizer step; None where the process was killed
    retries: int
    pinned_bytes: int
    failure: OutOfMemory | None
    versions: tuple[tuple[str, str], ...]  # of torch, CUDA and cuDNN
    step_count: int
    was_stopped: bool  # by --stop-after

    @property
    def peak(self) -> Peaks:
        """Return the peaks of the whole process."""
        every = [*(step.peaks for step in self.steps), *([self.after_steps] if self.after_steps else [])]
        return Peaks(
            max((one.allocated_bytes for one in every), default=0),
            max((one.reserved_bytes for one in every), default=0),
            max((one.process_bytes for one in every), default=0),
        )


@dataclass(frozen=True, slots=True)
class EmulatedRun:
    """A command that ran on emulated GPUs."""

    gpu: str
    gpu_count: int
    command: tuple[str, ...]
    exit_code: int
    records: tuple[GpuRecord, ...]  # at least one
    seconds: float
    assumptions: tuple[str, ...]
    histories: tuple[History, ...] = ()  # of each process and GPU; none unless they are asked for

    @property
    def largest(self) -> GpuRecord:
        """Return the record of the process that takes most memory."""
        return max(self.records, key=lambda record: (record.peak.process_bytes, -record.rank))

    @property
    def failure(self) -> OutOfMemory | None:
        """Return where memory ran out, if that ended the command."""
        failed = [record.failure for record in self.records if record.failure is not None]
        if not self.exit_code or not failed:
            return None
        return next((one for one in failed if one.was_raised), failed[0])

    @property
    def outcome(self) -> Outcome:
        """Return whether the command fits the GPU."""
        if self.failure is not None:
            return Outcome.DOES_NOT_FIT
        return Outcome.FITS_WITH_RETRIES if any(record.retries for record in self.records) else Outcome.FITS


def read_records(folder: Path) -> tuple[GpuRecord, ...]:
    """Read the records in a folder, by rank and GPU. Raises DataFileError for one that is broken."""
    found: list[GpuRecord] = []
    for path in sorted(folder.glob("*.json")):
        try:
            found += _records_of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataFileError(f"{path}: not a record of an emulated run; run the command again") from error
    return tuple(sorted(found, key=lambda record: (record.rank, record.pid, record.device)))


def _records_of(data: dict[str, Any]) -> Iterable[GpuRecord]:
    devices = {row["device"] for step in data["steps"] for row in step["peaks"]}
    devices |= {row["device"] for row in data["after_steps"]}
    devices |= {data["failure"]["device"]} if data["failure"] else set()
    for device in sorted(devices):
        failure = data["failure"]
        yield GpuRecord(
            rank=data["rank"],
            pid=data["pid"],
            device=device,
            steps=tuple(
                StepPeaks(step["first"], step["last"], peaks)
                for step in data["steps"]
                if (peaks := _peaks(step["peaks"], device)) is not None
            ),
            after_steps=_peaks(data["after_steps"], device),
            retries=data["retries"].get(str(device), 0),
            pinned_bytes=data["pinned_bytes"],
            failure=_failure(failure) if failure and failure["device"] == device else None,
            versions=_versions(data["versions"]),
            step_count=data["step_count"],
            was_stopped=data["stopped"],
        )


def _versions(data: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the versions as text; of cuDNN there is a number."""
    cudnn = format_cudnn_version(data["cudnn"]) or "none"
    return tuple((name, cudnn if name == "cudnn" else str(value)) for name, value in data.items())


def _peaks(rows: Iterable[dict[str, int]], device: int) -> Peaks | None:
    found = next((row for row in rows if row["device"] == device), None)
    return None if found is None else Peaks(found["allocated"], found["reserved"], found["process"])


def _failure(data: dict[str, Any]) -> OutOfMemory:
    return OutOfMemory(
        data["step"],
        data["phase"],
        data["module"],
        data["line"],
        data["requested_bytes"],
        bool(data.get("ended")),
    )
