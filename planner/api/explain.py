"""For Python: where the memory of a batch goes, and how a trace differs from what a GPU recorded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Unpack

from planner.allocator.history import Difference, Recording, compare_with_recording
from planner.api.options import Options
from planner.api.request import (
    Model,
    batch_of,
    budget_of,
    calibrate_budget,
    ignore_progress,
    job_of,
    workload_of,
)
from planner.capture.subprocess import opener_of
from planner.errors import ModelError, unsaved
from planner.hardware import Budget
from planner.jobs import Job, Mode, check_count, reset_options
from planner.planning import (
    LARGEST_BATCH,
    BatchCurve,
    Estimate,
    Explanation,
    OnProgress,
    Shown,
    Workload,
    check_batch,
    estimate as estimate_batch,
    explain as explain_run,
    over_epoch,
    save_workload,
    take_detailed_trace,
    take_trace,
    without_end,
)
from planner.program import Trace
from planner.report import Result

ReadRecording = Callable[[Job, int], Recording]  # of a job at a batch size
MOST_SHOWN = 10**6


@dataclass(frozen=True, slots=True)
class ExplainResult(Result):
    """Where the memory of one batch size goes; `str` gives the text report."""

    estimate: Estimate
    explanation: Explanation
    trace: Trace  # that is explained
    difference: Difference | None  # to a recording, where one was given
    shown: Shown
    import_seconds: float

    def draw(self, path: Path) -> None:
        """Draw the timeline; the suffix says which format. Needs matplotlib; raises DataFileError."""
        from planner.report import draw_timeline, summary_of

        draw_timeline(self.explanation, summary_of(self.estimate, self.explanation).caption, path)

    def save_snapshot(self, path: Path) -> None:
        """Write the run on the card as torch's memory_viz reads it. Raises DataFileError."""
        from planner.allocator.history import save_snapshot

        save_snapshot(self.trace, self.estimate.run.batch, self.estimate.budget.arena, path)

    def save_page(self, path: Path, curve: BatchCurve | None = None) -> None:
        """Write one self-contained HTML page; `curve` lets its reader choose other batch sizes and GPUs.

        Needs plotly; raises DataFileError.
        """
        from planner.report import save_page, summary_of

        summary = summary_of(self.estimate, self.explanation)
        save_page(summary, self.explanation, self.trace, self.shown, curve, path)


def explain(
    model: Model | None = None,
    batch: int | None = None,
    *,
    against: ReadRecording | None = None,
    top: int | None = None,
    depth: int | None = None,
    **options: Unpack[Options],
) -> ExplainResult:
    """Where the memory of a batch goes at its peak; with a recording, how it differs from the GPU's.

    `model` and `batch` are as for `estimate`; with a saved trace there are neither source lines nor an
    evaluation beside the training. `top` bounds the tensors and differences that are shown, `depth` the
    levels of modules, by default to as many as are readable. Raises the errors of `planner.errors`; that the
    batch does not fit is a result.
    """
    if batch is not None:
        check_count("--batch", batch, LARGEST_BATCH)
    default = Shown()
    shown = Shown(
        default.top if top is None else check_count("--top", top, MOST_SHOWN),
        None if depth is None else check_count("--depth", depth, MOST_SHOWN),
    )
    on_progress = options.get("on_progress") or ignore_progress
    start = perf_counter()
    setting = _open(model, batch, against, options)
    tracer = setting.workload.open(on_progress)
    opened = perf_counter()
    job, size, budget = setting.workload.job, setting.batch, setting.budget
    check_batch(job, size)
    on_progress(f"tracing batch {size}")
    trace = over_epoch(job, size, tracer)
    evaluation = _evaluation(setting, on_progress)
    traced = perf_counter()
    found = estimate_batch(job, trace, size, budget, traced - opened)
    arena = budget.arena if found.failed is None else without_end(budget.arena)
    explanation = explain_run(trace, size, arena, evaluation)
    difference = None
    if setting.recording is not None:
        on_progress("aligning trace and recording")
        difference = compare_with_recording(tracer(size), size, setting.recording)
    found = replace(found, seconds=replace(found.seconds, replay=perf_counter() - traced))
    result = ExplainResult(found, explanation, trace, difference, shown, opened - start)
    path = options.get("save_trace")
    if path is not None:
        with unsaved(result):
            save_workload(setting.workload, tracer, size, Path(path), on_progress)
    return result


@dataclass(frozen=True, slots=True)
class _Setting:
    """What is explained, before the time is spent that its traces take."""

    workload: Workload
    batch: int
    budget: Budget
    recording: Recording | None
    evaluation: Workload | None  # the same model in eval mode; None where it cannot be traced or is the job


def _open(
    model: Model | None, batch: int | None, against: ReadRecording | None, options: Options
) -> _Setting:
    budget = budget_of(options)
    chip = budget.device.target
    if options.get("trace") is not None:
        workload = workload_of(model, options, budget)
        size = batch_of(batch, workload.batch, workload.job)
        recording = None if against is None else against(workload.job, size)
        budget = calibrate_budget(budget, workload.job, options)
        return _Setting(workload, size, budget, recording, None)
    job, known, factory = job_of(model, options)
    size = batch_of(batch, known, job)
    recording = None if against is None else against(job, size)
    if recording is not None and recording.marks and options.get("steps") is None:
        job = replace(job, steps=max(1, *(mark.step for mark in recording.marks)))  # as many as recorded
    open_workload = opener_of(options)
    workload = open_workload(job, known, factory, chip, take_detailed_trace)
    evaluation = None
    if job.mode is Mode.TRAIN:
        evaluation = open_workload(_evaluating(job), known, factory, chip, take_trace)
    return _Setting(workload, size, calibrate_budget(budget, job, options), recording, evaluation)


def _evaluating(job: Job) -> Job:
    """The job's model in eval mode without gradients, in a process of its own."""
    return replace(reset_options(job, where=lambda option: option.is_for_training), mode=Mode.INFER)


def _evaluation(setting: _Setting, on_progress: OnProgress) -> Trace | None:
    """The trace of inference; None where the model cannot run in eval mode, as some detectors cannot."""
    if setting.evaluation is None:
        return None
    on_progress(f"tracing batch {setting.batch} in eval mode")
    try:
        return setting.evaluation.open(on_progress)(setting.batch)
    except ModelError:
        return None
