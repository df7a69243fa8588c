"""The programs of a job: from stores and capture, from a process of its own, or one of each run."""

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct

from planner.capture import TracerProcess
from planner.emulator import open_convolutions
from planner.errors import UsageError
from planner.jobs import Job, is_completed_by_library
from planner.program import (
    OnProgress,
    Program,
    ProgramBuilder,
    ProgramSet,
    Target,
    TraceSource,
    constant_program,
)
from planner.store import ProgramSource, ProgramStore, complete_job

Factory = Callable[[], object]  # returns an nn.Module


class CaptureMode(Enum):
    """The way in which traces are captured."""

    SHARED = "shared"  # a program of the job gives as many traces as it can
    RUNS = "runs"  # each trace is a run of the model
    WITH_PROVENANCE = "with provenance"  # the same, with the provenance of blocks


def open_programs(
    job: Job,
    on_progress: OnProgress,
    factory: Factory | None = None,
    stores: Sequence[ProgramStore] = (),
    mode: CaptureMode = CaptureMode.SHARED,
    limit_seconds: float | None = None,
    cache_folder: Path | None = None,
) -> ProgramSet:
    """Return the programs of a job; with a factory, of the model that it returns.

    torch is imported at once, or with `stores` for what none of them has. With `limit_seconds`, a process of
    its own captures, each run within so many seconds. Raises UsageError where it is to capture a model that
    is an object of this process. The answers of a cuDNN are cached in `cache_folder`.
    """
    convolutions = open_convolutions(job, cache_folder)
    if limit_seconds is not None:
        if factory is not None:
            raise UsageError("--isolate: another process cannot see this object; name it as FILE.py:NAME")
        on_progress("starting a process for the model")
        process = TracerProcess(job, limit_seconds, provenance=mode is CaptureMode.WITH_PROVENANCE)
        return ProgramSource(job, (), lambda: process, convolutions)
    if mode is CaptureMode.SHARED:
        builder = None if stores else _open_builder(job, on_progress, factory)
        return ProgramSource(
            job, stores, lambda: builder or _open_builder(job, on_progress, factory), convolutions
        )
    on_progress("importing torch and the model's library")
    from planner.capture import construct_model, find_constructor

    constructor = factory or find_constructor(job)
    provenance = mode is CaptureMode.WITH_PROVENANCE
    runs = _RunBuilder(job, lambda job: construct_model(job, constructor), provenance)
    return ProgramSource(job, (), lambda: runs, convolutions)


def open_traces(
    job: Job,
    target: Target,
    on_progress: OnProgress,
    factory: Factory | None = None,
    mode: CaptureMode = CaptureMode.SHARED,
) -> TraceSource:
    """Return the traces of a job on a GPU; with a factory, of the model that it returns."""
    programs = open_programs(job, on_progress, factory, mode=mode)
    return lambda batch: programs.trace(batch, target)


def _open_builder(job: Job, on_progress: OnProgress, factory: Factory | None) -> ProgramBuilder:
    on_progress("importing torch and the model's library")
    from planner.capture import open_builder

    return open_builder(job, on_progress, factory)


class _RunBuilder(Struct, frozen=True):
    """Builder of programs each of which is a run of the model."""

    job: Job
    build: Callable[[Job], Any]
    provenance: bool  # of the blocks

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return none: each batch size is a run."""
        return ()

    def run(self, batch: int, target: Target) -> Program:
        """Return the program of one run."""
        from planner.capture import ProvenanceCollector, record

        provenance = ProvenanceCollector() if self.provenance else None
        trace = record(
            self.job, batch, target.capability, self.build, provenance,
            sm_count=target.sm_count, conv_workspace_query=target.conv_workspace_query,
        )  # fmt: skip
        return constant_program(trace, target)

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Do nothing: a run has no variants."""


def complete_from_library(job: Job, stores: Sequence[ProgramStore] = ()) -> Job:
    """Return the job with the inputs that its model's library knows.

    The library is imported only where no store has the job. Raises UsageError or ModelError.
    """
    return complete_job(job, stores, _completed) if is_completed_by_library(job) else job


def _completed(job: Job) -> Job:
    from planner.capture import complete_by_library

    return complete_by_library(job)
