"""`planner.explain`: the memory of a batch by category, module and tensor.

There are curves over batch sizes, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Unpack

from msgspec.structs import replace

from planner.allocator.history import Difference, Recording, compare_with_recording
from planner.api.fleet.gpus import gpus
from planner.api.request.budget import budget_for, find_budget
from planner.api.request.options import Options
from planner.api.request.request import Model, Request
from planner.api.request.varying import is_varying, open_any_request, open_sized_programs
from planner.errors import ModelError, UsageError
from planner.hardware import UNLIMITED_BYTES, Budget, Device, judge_budget, load_devices
from planner.jobs import Compile, Job, Mode, at_size, check_count, reset_options
from planner.planning import (
    BatchCurve,
    CaptureMode,
    DisplayLimits,
    Estimate,
    Explanation,
    SampledRun,
    VaryingPlan,
    estimate_batch,
    estimate_varying,
    explain as explain_run,
    take_curve,
    with_last_batch,
)
from planner.program import FIT_BATCHES, Trace, ignore_progress
from planner.report import Report, Result, report_of
from planner.store import open_saved

ReadRecording = Callable[[Job, int], Recording]  # reads a recording of a job at a batch size
MOST_SHOWN = 10**6


@dataclass(frozen=True, slots=True)
class ExplainResult(Result):
    """The memory of one batch size by category, module and tensor. `str` gives the text report."""

    estimate: Estimate
    explanation: Explanation
    trace: Trace  # the explained trace
    difference: Difference | None  # differences from a recording, if one was given
    limits: DisplayLimits
    import_seconds: float

    def draw(self, path: Path | str) -> None:
        """Draw the memory timeline to a file.

        The suffix of the file selects the format. Needs matplotlib; raises DataFileError.
        """
        from planner.report import draw_timeline, summary_of

        draw_timeline(self.explanation, summary_of(self.estimate, self.explanation).caption, Path(path))

    def save_snapshot(self, path: Path | str) -> None:
        """Write the simulated run as a snapshot for torch's memory_viz. Raises DataFileError."""
        from planner.allocator.history import save_snapshot

        save_snapshot(self.trace, self.estimate.budget.likely_limits, Path(path))

    def save_page(self, path: Path | str, curve: BatchCurve | None = None) -> None:
        """Write the explanation as an HTML page.

        The page offers the batch sizes and GPUs of `curve`. Raises DataFileError.
        """
        from planner.report import save_page, summary_of

        summary = summary_of(self.estimate, self.explanation)
        save_page(summary, self.explanation, self.trace, self.limits, curve, Path(path))

    def _report(self) -> Report:
        from planner.report import explanation_document, explanation_to_json

        return report_of(
            explanation_document,
            explanation_to_json,
            self.estimate,
            self.explanation,
            self.difference,
            self.limits,
            self.import_seconds,
        )


@dataclass(frozen=True, slots=True)
class VaryingExplainResult(ExplainResult):
    """The memory of the worst batch in sampled runs, by category, module and tensor.

    The runs are sampled if samples have varying sizes. The fields of `ExplainResult` describe only that
    batch, at its own size.
    """

    plan: VaryingPlan  # the plan from sampled runs
    sequence: int  # number of the run that has the batch
    sampled: SampledRun

    def _report(self) -> Report:
        from planner.report import worst_batch_document, worst_batch_to_json

        return report_of(
            worst_batch_document,
            worst_batch_to_json,
            self.estimate,
            self.explanation,
            self.limits,
            self.import_seconds,
            self.plan,
            self.sequence,
            self.sampled,
        )


def explain(
    model: Model | None = None,
    batch: int | None = None,
    *,
    against: ReadRecording | None = None,
    top: int | None = None,
    depth: int | None = None,
    **options: Unpack[Options],
) -> ExplainResult:
    """Explain the peak memory of a batch by category, module and tensor.

    With `against`, the differences from a GPU's recording are found, too. `model` and `batch` are as for
    `estimate`; with a saved trace there are neither source lines nor a separate evaluation. `top` limits the
    tensors and differences that are shown, `depth` the levels of modules; by default `depth` is as large as
    is readable. If samples have varying sizes, the worst batch of the sampled runs is explained. Raises the
    errors of `planner.errors`; that the batch does not fit is a result.
    """
    default = DisplayLimits()
    display_limits = DisplayLimits(
        default.top if top is None else check_count("--top", top, MOST_SHOWN),
        None if depth is None else check_count("--depth", depth, MOST_SHOWN),
    )
    request = open_any_request(model, options, batch)
    if is_varying(request):
        if against is not None:
            raise UsageError("--against: a recording is of samples of one size; remove it, or give one size")
        return _explain_worst(request, display_limits)
    recording = None if against is None else against(request.job, request.batch)
    if recording is not None and recording.steps and request.saved is None and options.get("steps") is None:
        request = replace(request, job=request.job.replace(steps=recording.steps))
    job, size, budget, on_progress = request.job, request.batch, request.budget, request.on_progress
    traces = request.traces(CaptureMode.WITH_PROVENANCE)
    opened = perf_counter()
    on_progress(f"tracing batch {size}")
    trace = with_last_batch(job, size, traces)
    evaluation = _evaluate(request)
    traced = perf_counter()
    estimate = estimate_batch(job, trace, budget, traced - opened)
    explanation = explain_run(trace, estimate.limits, evaluation)
    difference = None
    if recording is not None:
        on_progress("aligning trace and recording")
        difference = compare_with_recording(traces(size), recording)
    estimate = replace(estimate, seconds=replace(estimate.seconds, replay=perf_counter() - traced))
    result = ExplainResult(estimate, explanation, trace, difference, display_limits, opened - request.start)
    request.save_trace(result, size)
    return result


def _explain_worst(request: Request, display_limits: DisplayLimits) -> VaryingExplainResult:
    """Return the explanation of the sampled runs' batch that fails or, if none fails, allocates most."""
    opened = perf_counter()
    programs = open_sized_programs(request)
    plan = estimate_varying(request.job, request.budget, programs, request.batch)
    side = plan.sides[0]
    assert side.at is not None
    runs = side.at.runs
    number = max(
        range(len(runs)), key=lambda n: (bool(runs[n].failed_step), runs[n].replay.peak_allocated_bytes)
    )
    shape = runs[number].worst
    job, budget = at_size(request.job, shape.size), side.budget
    request.on_progress(f"tracing batch {shape.batch} of the size {'x'.join(map(str, shape.size))}")
    trace = request.traces(CaptureMode.WITH_PROVENANCE, job)(shape.batch)
    estimate = estimate_batch(job, trace, budget, plan.seconds.trace)
    explanation = explain_run(trace, estimate.limits)
    estimate = replace(estimate, seconds=replace(estimate.seconds, replay=plan.seconds.replay))
    imported = opened - request.start
    return VaryingExplainResult(
        estimate, explanation, trace, None, display_limits, imported, plan, number, runs[number]
    )


def _evaluate(request: Request) -> Trace | None:
    """Return the trace of a training job's batch in eval mode, or None if there is none.

    Returns None if the job does not train, if the job comes from a trace file, or if the trace cannot be
    captured.
    """
    if request.saved is not None or request.job.loop.mode is not Mode.TRAIN:
        return None
    request.on_progress(f"tracing batch {request.batch} in eval mode")
    job = reset_options(request.job, where=lambda option: option.is_for_training).replace(mode=Mode.INFER)
    try:
        return request.traces(job=job)(request.batch)
    except ModelError:
        return None


def batch_curve(
    model: Model | None = None,
    batch: int = 1,
    *,
    devices: Sequence[Device] | None = None,
    **options: Unpack[Options],
) -> BatchCurve | None:
    """Return curves of a model's memory against batch size on several GPUs, or None if none can be made.

    The GPUs are `devices`, by default all known GPUs. The GPU of the options is selected; without it, an
    unlimited GPU comes first and is selected. A compiled job, whose code differs between kinds of GPU, has
    curves for GPUs of the selected GPU's kind. Returns None if a saved trace holds for one batch size only,
    or if a compiled job has no GPU. Raises the errors of `planner.errors`.
    """
    path = options.get("trace")
    if path is not None and not open_saved(Path(path)).covers_batches:
        return None
    budget = find_budget(options)
    shown = list(load_devices() if devices is None else devices)
    endless = budget.device.total.value >= UNLIMITED_BYTES
    if options.get("compile") not in (None, Compile.NONE):
        if endless:
            return None
        shown = [device for device in shown if device.target.kind == budget.device.target.kind]
    if not endless and budget.device not in shown:
        shown.insert(0, budget.device)
    # If the guards of a stored program fail, each batch size must be captured: for the many batch sizes
    # of a curve, a program with its rules is faster.
    rest: Options = {**options, "gpu": None, "gpu_mib": None, "save_trace": None, "cache": None}
    table = gpus(model, devices=shown, sort="memory", **rest).table
    (options.get("on_progress") or ignore_progress)(f"replaying {len(table.fits)} GPUs")
    budgets: list[tuple[Budget, int | None]] = [(fit.budget, fit.max_batch) for fit in table.fits]
    if endless:
        target = budget.device.target
        first = table.programs.trace(table.programs.batch_sizes(target).floor(FIT_BATCHES[0]), target)
        budgets.insert(0, (judge_budget(budget_for(budget, table.job), table.job, first), None))
    names = [budget.device.name for budget, _ in budgets]
    return take_curve(budgets, table.programs, batch, names.index(budget.device.name))
