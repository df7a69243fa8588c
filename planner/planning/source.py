"""A job together with the source of its traces: the tracer, or a file that an earlier trace was saved to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from planner._support.versions import installed_version
from planner.jobs import Job, is_completed_by_library
from planner.planning.max_batch import OnProgress, TraceSource
from planner.program import Target, Trace
from planner.store import Fresh, KeptCards, KeptTracer, Shelves, open_saved, save_job

Factory = Callable[[], object]  # returns an nn.Module
Take = Callable[[Job, int, Target, Callable[[Job], Any]], Trace]  # the last one builds the model


@dataclass(frozen=True, slots=True)
class Workload:
    """What is planned, before the time is spent that its traces take."""

    job: Job
    batch: int | None  # the job's own batch size, where it has one
    chip: Target  # of the GPU that is traced for
    open: Callable[[OnProgress], TraceSource]  # may import torch; the tracer takes each trace once
    keeper: Callable[[OnProgress], Fresh] | None = (
        None  # takes its loops; None where the model runs elsewhere
    )


def take_trace(job: Job, size: int, chip: Target, build: Callable[[Job], Any]) -> Trace:
    """The trace as plans need it."""
    from planner.capture import record

    return record(job, size, chip.capability, build, sm_count=chip.sm_count)


def take_alone(job: Job, size: int, chip: Target, build: Callable[[Job], Any]) -> Trace:
    """The same, run in any case: what other runs of the job tell is not enough for whoever asks for this."""
    return take_trace(job, size, chip, build)


def take_detailed_trace(job: Job, size: int, chip: Target, build: Callable[[Job], Any]) -> Trace:
    """The trace with the details of its blocks, as explanations want them."""
    from planner.capture import record
    from planner.capture.recorder import ProvenanceCollector

    return record(job, size, chip.capability, build, ProvenanceCollector(), sm_count=chip.sm_count)


def complete_from_library(job: Job, shelves: Shelves | None = None) -> Job:
    """The job with the inputs that its model's library tells, which is imported only for such models, and
    only where no shelf remembers what it said.

    Raises UsageError or ModelError.
    """
    if not is_completed_by_library(job):
        return job
    return _completed(job) if shelves is None else shelves.completed(job, _completed)


def _completed(job: Job) -> Job:
    from planner.capture.models import complete_by_library

    return complete_by_library(job)


def trace_workload(
    job: Job, batch: int | None, factory: Factory | None, chip: Target, take: Take = take_trace
) -> Workload:
    """The workload of a job that is traced; with a factory, of the model that it returns.

    `take_trace` runs the model as often as it takes to tell all traces, the others once for each of them.
    """

    def start(tell: OnProgress) -> TraceSource:
        tell("importing torch and the model's library")
        from planner.capture.models import construct_model, find_constructor
        from planner.capture.symbolic import Foretold

        constructor = factory or find_constructor(job)
        note = f"traced with PyTorch {installed_version('torch')}; other versions keep other tensors"

        def build(job: Job) -> Any:
            return construct_model(job, constructor)

        one = Foretold(job, chip, build) if take is take_trace else partial(_taken, take, job, chip, build)

        @cache
        def tracer(size: int) -> Trace:
            taken = one(size)
            return replace(taken, notes=(*taken.notes, note))

        return tracer

    def keep(tell: OnProgress) -> Fresh:
        from planner.capture.symbolic import open_keeper, open_keeper_of

        return open_keeper(job, tell) if factory is None else open_keeper_of(job, factory, tell)

    return Workload(job, batch, chip, start, keep)


def _taken(take: Take, job: Job, chip: Target, build: Callable[[Job], Any], size: int) -> Trace:
    return take(job, size, chip, build)


def kept_workload(job: Job, batch: int | None, chip: Target, shelves: Shelves) -> Workload:
    """The workload of a job the traces of which are kept; torch is imported for what no shelf has."""

    def start(tell: OnProgress) -> TraceSource:
        return KeptTracer(job, chip, shelves, starter_of(job, tell))

    return Workload(job, batch, chip, start, lambda tell: KeptCards(job, shelves, starter_of(job, tell)))


def starter_of(job: Job, tell: OnProgress) -> Callable[[], Fresh]:
    """What imports torch and the model's library, once it is called, to take traces that are kept."""

    def start() -> Fresh:
        tell("importing torch and the model's library")
        from planner.capture.symbolic import open_keeper

        return open_keeper(job, tell)

    return start


def load_workload(path: Path, chip: Target) -> Workload:
    """The workload of a file that `save_workload` wrote, to be planned for `chip`; torch is not needed.

    Raises DataFileError for a broken file; its tracer raises UsageError for a batch size that the file says
    nothing about.
    """
    saved = open_saved(path)

    def start(tell: OnProgress) -> TraceSource:
        return cache(lambda size: saved.traces.at(size, chip))

    return Workload(saved.job, saved.batch, Target.for_capability(saved.capability), start)


def save_workload(workload: Workload, tracer: TraceSource, batch: int, path: Path, tell: OnProgress) -> None:
    """Write what plans by itself without torch, at every batch size as the job itself where it has loops."""
    keeper = None
    if workload.keeper is not None and not workload.job.cudnn:  # a library answers only while one traces
        tell("taking loops for all GPUs, to be saved")
        keeper = workload.keeper(tell)
    save_job(workload.job, batch, workload.chip, tracer, keeper, path)
