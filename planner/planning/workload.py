"""A job together with the source of its traces: stores and capture, a process of its own, or a saved file."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner._support.versions import installed_version
from planner.capture.subprocess import TracerProcess
from planner.errors import UsageError
from planner.jobs import Job, is_completed_by_library
from planner.program import (
    LowerBound,
    OnProgress,
    ProgramBuilder,
    ProgramSet,
    Target,
    Trace,
    TraceSource,
)
from planner.store import ProgramSource, ProgramStore, complete_job, note_on_torch, open_saved, save_job

Factory = Callable[[], object]  # returns an nn.Module


class CaptureMode(Enum):
    """The way in which traces are captured."""

    SHARED = "shared"  # a program of the job gives as many traces as it can
    UNSHARED = "unshared"  # each trace is a run of the model
    WITH_PROVENANCE = "with provenance"  # likewise, with the provenance of blocks


class Workload(Struct, frozen=True):
    """A job to plan, before the time is spent that its traces take."""

    job: Job
    batch: int | None  # the job's own batch size, where it has one
    target: Target  # of the GPU that is planned for
    open_programs: Callable[[OnProgress], ProgramSet]  # may import torch

    def open(self, on_progress: OnProgress) -> TraceSource:
        """Return the traces on the GPU that is planned for."""
        programs = self.open_programs(on_progress)
        return lambda batch: programs.trace(batch, self.target)


def trace_workload(
    job: Job,
    batch: int | None,
    factory: Factory | None,
    target: Target,
    mode: CaptureMode = CaptureMode.SHARED,
) -> Workload:
    """Return the workload of a job that is captured; with a factory, of the model that it returns."""

    def start(on_progress: OnProgress) -> ProgramSet:
        on_progress("importing torch and the model's library")
        if mode is CaptureMode.SHARED:
            builder = _open_builder(job, factory, on_progress)
            return ProgramSource(job, (), lambda: builder)
        from planner.capture.models import construct_model, find_constructor

        constructor = factory or find_constructor(job)
        return _Runs(job, lambda job: construct_model(job, constructor), mode)

    return Workload(job, batch, target, start)


def isolated_workload(
    job: Job,
    batch: int | None,
    factory: Factory | None,
    target: Target,
    mode: CaptureMode,
    limit_seconds: float,
) -> Workload:
    """Return the workload of a job that a process of its own captures, each run within `limit_seconds`.

    Raises UsageError for a model that is an object of this process.
    """
    if factory is not None:
        raise UsageError("--isolate: another process cannot see this object; name it as FILE.py:NAME")

    def start(on_progress: OnProgress) -> ProgramSet:
        on_progress("starting a process for the model")
        process = TracerProcess(job, limit_seconds, provenance=mode is CaptureMode.WITH_PROVENANCE)
        return ProgramSource(job, (), lambda: process)

    return Workload(job, batch, target, start)


@dataclass(slots=True)
class _Runs:
    """Traces each of which is a run of the model."""

    job: Job
    build: Callable[[Job], Any]
    mode: CaptureMode
    _traces: dict[tuple[int, Target], Trace] = field(default_factory=dict)

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace at a batch size."""
        from planner.capture import record
        from planner.capture.recorder import ProvenanceCollector

        if (batch, target) not in self._traces:
            provenance = ProvenanceCollector() if self.mode is CaptureMode.WITH_PROVENANCE else None
            capability, sm_count = target.capability, target.sm_count
            taken = record(self.job, batch, capability, self.build, provenance, sm_count=sm_count)
            note = note_on_torch(installed_version("torch") or "?")
            self._traces[batch, target] = replace(taken, notes=(*taken.notes, note))
        return self._traces[batch, target]

    def key(self, batch: int, target: Target) -> Hashable:
        """Return None: traces have to be compared."""
        return None

    def bound(self, target: Target) -> LowerBound | None:
        """Return None: each trace is a run."""
        return None


def _open_builder(job: Job, factory: Factory | None, on_progress: OnProgress) -> ProgramBuilder:
    from planner.capture.symbolic import open_builder

    return open_builder(job, on_progress, factory)


def kept_workload(job: Job, batch: int | None, target: Target, stores: Sequence[ProgramStore]) -> Workload:
    """Return the workload of a job with stores; torch is imported for what none of them has."""

    def start(on_progress: OnProgress) -> ProgramSet:
        def open_builder() -> ProgramBuilder:
            on_progress("importing torch and the model's library")
            return _open_builder(job, None, on_progress)

        return ProgramSource(job, stores, open_builder)

    return Workload(job, batch, target, start)


def load_workload(path: Path, target: Target) -> Workload:
    """Return the workload of a file that `save_workload` wrote, to be planned for `target`, without torch.

    Raises DataFileError for a broken file; its traces raise UsageError for a batch size that it does not
    cover.
    """
    saved = open_saved(path)
    return Workload(saved.job, saved.batch, target, lambda on_progress: saved)


def save_workload(
    workload: Workload, programs: ProgramSet, batch: int, path: Path, on_progress: OnProgress
) -> None:
    """Write what plans by itself without torch, at every batch size where the job has programs."""
    on_progress("capturing programs for all GPUs, to be saved")
    save_job(workload.job, batch, workload.target, programs, path)


def complete_from_library(job: Job, stores: Sequence[ProgramStore] = ()) -> Job:
    """Return the job with the inputs that its model's library knows.

    The library is imported only where no store has the job. Raises UsageError or ModelError.
    """
    return complete_job(job, stores, _completed) if is_completed_by_library(job) else job


def _completed(job: Job) -> Job:
    from planner.capture.models import complete_by_library

    return complete_by_library(job)
