"""The programs of a job: from stores and capture, from a process of its own, or one of each run."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec.structs import replace

from planner._support.versions import installed_version
from planner.capture.subprocess import TracerProcess
from planner.errors import UsageError
from planner.jobs import Job, is_completed_by_library
from planner.program import LowerBound, OnProgress, ProgramBuilder, ProgramSet, Target, Trace, TraceSource
from planner.store import ProgramSource, ProgramStore, complete_job, note_on_torch

Factory = Callable[[], object]  # returns an nn.Module


class CaptureMode(Enum):
    """The way in which traces are captured."""

    SHARED = "shared"  # a program of the job gives as many traces as it can
    UNSHARED = "unshared"  # each trace is a run of the model
    WITH_PROVENANCE = "with provenance"  # likewise, with the provenance of blocks


def open_programs(
    job: Job,
    on_progress: OnProgress,
    factory: Factory | None = None,
    stores: Sequence[ProgramStore] = (),
    mode: CaptureMode = CaptureMode.SHARED,
    limit_seconds: float | None = None,
) -> ProgramSet:
    """Return the programs of a job; with a factory, of the model that it returns.

    torch is imported at once, or with `stores` for what none of them has. With `limit_seconds`, a process of
    its own captures, each run within so many seconds. Raises UsageError where it is to capture a model that
    is an object of this process.
    """
    if limit_seconds is not None:
        if factory is not None:
            raise UsageError("--isolate: another process cannot see this object; name it as FILE.py:NAME")
        on_progress("starting a process for the model")
        process = TracerProcess(job, limit_seconds, provenance=mode is CaptureMode.WITH_PROVENANCE)
        return ProgramSource(job, (), lambda: process)
    if mode is CaptureMode.SHARED:
        builder = None if stores else _open_builder(job, on_progress, factory)
        return ProgramSource(job, stores, lambda: builder or _open_builder(job, on_progress, factory))
    on_progress("importing torch and the model's library")
    from planner.capture.models import construct_model, find_constructor

    constructor = factory or find_constructor(job)
    return _Runs(job, lambda job: construct_model(job, constructor), mode)


def open_traces(
    job: Job, target: Target, on_progress: OnProgress, factory: Factory | None = None
) -> TraceSource:
    """Return the traces of a job on a GPU; with a factory, of the model that it returns."""
    programs = open_programs(job, on_progress, factory)
    return lambda batch: programs.trace(batch, target)


def _open_builder(job: Job, on_progress: OnProgress, factory: Factory | None) -> ProgramBuilder:
    on_progress("importing torch and the model's library")
    from planner.capture.symbolic import open_builder

    return open_builder(job, on_progress, factory)


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


def complete_from_library(job: Job, stores: Sequence[ProgramStore] = ()) -> Job:
    """Return the job with the inputs that its model's library knows.

    The library is imported only where no store has the job. Raises UsageError or ModelError.
    """
    return complete_job(job, stores, _completed) if is_completed_by_library(job) else job


def _completed(job: Job) -> Job:
    from planner.capture.models import complete_by_library

    return complete_by_library(job)
