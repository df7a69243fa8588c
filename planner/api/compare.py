"""For Python: estimates by other methods than the trace, and all of them side by side."""

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Unpack

from planner.allocator import parse_alloc_conf, rules_of_torch
from planner.api.options import Options
from planner.api.request import (
    Model,
    batch_of,
    budget_of,
    calibrate_budget,
    ignore_progress,
    job_of,
    refuse_no_card,
    stored_calibrations,
    wanted_of,
)
from planner.capture.subprocess import refuse_isolation
from planner.errors import UsageError
from planner.hardware import GENERIC_CAPABILITY, Budget
from planner.hardware.calibration import find_run
from planner.jobs import CatalogueEntry, Job, check_count, load_catalogue
from planner.planning import LARGEST_BATCH, OnProgress, check_batch, estimate, over_epoch, trace_workload
from planner.planning.estimators import (
    Comparison,
    FormulaPlan,
    Kept,
    Measured,
    Method,
    StaticEstimate,
    compare as put_side_by_side,
    find_measured,
    kept_after,
    load_measured,
    measured_by_run,
    measured_from,
    open_builder,
    plan_by_formula,
    reject_unsupported_options,
    run_estimator,
    run_estimators,
)
from planner.program import Target
from planner.report import Result


@dataclass(frozen=True, slots=True)
class StaticEstimateResult(Result):
    """The memory of one batch size by another method than the trace; `str` gives the text report."""

    estimate: StaticEstimate
    import_seconds: float

    @property
    def fits(self) -> str:
        """`yes` or `no`."""
        return "yes" if self.estimate.fits else "no"


@dataclass(frozen=True, slots=True)
class FormulaBatchResult(Result):
    """The largest batch size by the closed formula; `str` gives the text report."""

    plan: FormulaPlan
    import_seconds: float

    @property
    def max_batch(self) -> int:
        """0 where not even 1 fits."""
        return self.plan.max_batch

    @property
    def answer_batch(self) -> int:
        """The same: the formula knows no retries."""
        return self.plan.max_batch


@dataclass(frozen=True, slots=True)
class CompareResult(Result):
    """All estimators side by side; `str` gives the text report."""

    comparison: Comparison


def estimate_statically(
    method: Method, model: Model | None, batch: int | None, options: Options
) -> StaticEstimateResult:
    """`planner.estimate` for every method but the trace."""
    reject_unsupported_options(method, options)
    refuse_isolation(options, "another method than the trace")
    budget = budget_of(options)
    job, known, factory = job_of(model, options)
    size = batch_of(batch, known, job)
    on_progress = options.get("on_progress") or ignore_progress
    start = perf_counter()
    build = open_builder(job, factory, on_progress)
    import_seconds = perf_counter() - start
    return StaticEstimateResult(run_estimator(method, job, size, budget, build, on_progress), import_seconds)


def max_batch_by_formula(model: Model | None, options: Options) -> FormulaBatchResult:
    """`planner.max_batch` by the closed formula."""
    reject_unsupported_options(Method.FORMULA, options)
    refuse_isolation(options, "the formula")
    refuse_no_card(options)
    budget = budget_of(options)
    job, _, factory = job_of(model, options)
    on_progress = options.get("on_progress") or ignore_progress
    start = perf_counter()
    build = open_builder(job, factory, on_progress)
    import_seconds = perf_counter() - start
    return FormulaBatchResult(plan_by_formula(job, budget, build, on_progress), import_seconds)


def compare(
    model: Model | None = None, batch: int | None = None, **options: Unpack[Options]
) -> CompareResult:
    """One batch size by every estimator, beside the measured value where one is stored: the run of a
    calibration on this card, else what the seeds published.

    Options are those of `planner.estimate` without `trace` and `save_trace`. An estimator that fails has
    its reason in its row; raises the errors of `planner.errors` where the planner's own trace fails.
    """
    if batch is not None:
        check_count("--batch", batch, LARGEST_BATCH)
    for name in ("trace", "save_trace"):
        if options.get(name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')}: compare runs the model itself; leave it away, or use estimate"
            )
    refuse_isolation(options, "compare")
    budget = budget_of(options)
    job, known, factory = job_of(model, options)
    stored = stored_calibrations(budget, options)
    budget = calibrate_budget(budget, job, options)
    size = batch_of(batch, known, job)
    check_batch(job, size)
    on_progress = options.get("on_progress") or ignore_progress
    start = perf_counter()
    run = find_run(stored, wanted_of(budget, job, options), size)
    measured = (run and measured_by_run(run)) or _measured(job, size, on_progress)
    budget = _as_measured(budget, measured, options)
    tracer = trace_workload(job, known, factory, budget.device.target).open(on_progress)
    build = open_builder(job, factory, on_progress)
    on_progress(f"tracing batch {size}")
    own = estimate(job, over_epoch(job, size, tracer), size, budget)
    said = run_estimators(job, size, budget, build, on_progress)
    return CompareResult(put_side_by_side(own, said, measured, perf_counter() - start))


def _as_measured(budget: Budget, measured: Measured | str, options: Options) -> Budget:
    """Return the budget with the allocator of the version of torch that the measured value names."""
    if isinstance(measured, str):
        return budget
    defaults = rules_of_torch(dict(measured.source.versions).get("torch", ""))
    rules = parse_alloc_conf(options.get("alloc_conf") or "", defaults)
    return replace(budget, arena=replace(budget.arena, rules=rules))


def _measured(job: Job, batch: int, on_progress: OnProgress) -> Measured | str:
    """The stored peak of a job of the catalogue, or why there is none."""
    catalogue = load_catalogue()
    entry = catalogue.get(job.model)
    if entry is None or entry.job != job:
        return "measured values are stored for the models of models.yaml as they stand there only"
    found = find_measured(load_measured(), job.model, batch)
    if found is None:
        return f"no measured value is stored for {job.model} at batch {batch}"
    peak, reserved = found
    return measured_from(peak, reserved, [_kept(name, catalogue[name], on_progress) for name in peak.kept])


def _kept(name: str, entry: CatalogueEntry, on_progress: OnProgress) -> Kept:
    on_progress(f"tracing {name}, which stayed on the GPU")
    tracer = trace_workload(entry.job, entry.batch, None, Target.for_capability(GENERIC_CAPABILITY)).open(
        ignore_progress
    )
    return Kept(name, kept_after(tracer(entry.batch), entry.batch))
