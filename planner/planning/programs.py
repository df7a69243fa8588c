"""Open the programs of a job from stores or captures.

A capture runs in the current or another process, for all batch sizes or for a single one.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

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
    Trace,
    TraceSource,
    constant_program,
)
from planner.store import ProgramSource, ProgramStore, complete_cached

Factory = Callable[[], object]  # returns an nn.Module


class CaptureMode(Enum):
    """The way to capture the traces of a job: from a shared program, or by a run for each trace."""

    SHARED = "shared"  # a program of the job gives as many traces as it can
    RUNS = "runs"  # each trace is captured by its own run of the model
    WITH_PROVENANCE = "with provenance"  # as RUNS, with the provenance of blocks


def open_programs(
    job: Job,
    on_progress: OnProgress,
    factory: Factory | None = None,
    stores: Sequence[ProgramStore] = (),
    mode: CaptureMode = CaptureMode.SHARED,
    limit_seconds: float | None = None,
    cache_folder: Path | None = None,
) -> ProgramSet:
    """Return the `ProgramSet` of a job, whose programs are read from `stores` or captured.

    The model is built by `factory` if it is given. torch is imported at once, or, with `stores` in the mode
    SHARED, only if no store has a program. With `limit_seconds`, another process captures the model, and each
    run may take at most `limit_seconds`. Raises UsageError for `limit_seconds` with a `factory`, which the
    other process cannot call. The answers of a cuDNN are cached in `cache_folder`.
    """
    convolutions = open_convolutions(job, cache_folder)
    if limit_seconds is not None:
        if factory is not None:
            raise UsageError("--isolate: another process cannot see this object; name it as FILE.py:NAME")
        on_progress("starting a process for the model")
        process = TracerProcess(job, limit_seconds, provenance=mode is CaptureMode.WITH_PROVENANCE)
        return ProgramSource(job, (), lambda: process, convolutions)

    def open_by_mode() -> ProgramBuilder:
        on_progress("importing torch and the model's library")
        from planner.capture import LEAST_DEPTH_OF_RUN, ProvenanceCollector, find_constructor, open_builder

        if mode is CaptureMode.SHARED:
            return open_builder(job, on_progress, factory)
        if mode is CaptureMode.RUNS:
            return _RunBuilder(open_builder(job, on_progress, factory, LEAST_DEPTH_OF_RUN).trace)
        whole = open_builder(
            job, on_progress, factory or find_constructor(job)
        )  # with a constructor, no depth
        return _RunBuilder(lambda batch, target: whole.trace(batch, target, ProvenanceCollector()))

    if mode is CaptureMode.SHARED and stores:
        return ProgramSource(job, stores, open_by_mode, convolutions)
    builder = open_by_mode()
    return ProgramSource(job, (), lambda: builder, convolutions)


def open_traces(
    job: Job,
    target: Target,
    on_progress: OnProgress,
    factory: Factory | None = None,
    mode: CaptureMode = CaptureMode.SHARED,
) -> TraceSource:
    """Return a function that gives the trace of a job at a batch size on a GPU.

    The model is built by `factory` if it is given.
    """
    programs = open_programs(job, on_progress, factory, mode=mode)
    return lambda batch: programs.trace(batch, target)


class _RunBuilder(Struct, frozen=True):
    """A builder that runs the model for each batch size. It has no program for all batch sizes."""

    trace: Callable[[int, Target], Trace]  # of a batch size on a GPU

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return an empty tuple, since each batch size is captured by its own run."""
        return ()

    def run(self, batch: int, target: Target) -> Program:
        """Run the model at a batch size, and return a program for that batch size alone."""
        return constant_program(self.trace(batch, target), target)

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Do nothing: a run has no variants."""


def complete_from_library(job: Job, stores: Sequence[ProgramStore] = ()) -> Job:
    """Return the job with inputs filled in by the model's library, or by a store that has the job.

    The job is returned unchanged if the library supplies no inputs. The library is imported only if no store
    has the job. Raises UsageError or ModelError.
    """
    return complete_cached(job, stores, _completed) if is_completed_by_library(job) else job


def _completed(job: Job) -> Job:
    from planner.capture import complete_by_library

    return complete_by_library(job)
