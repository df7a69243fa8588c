"""The planner for Python: `max_batch` and `estimate`, with the options of the command line as keywords.

Nothing here imports torch before the first trace, nor ever the terminal's libraries.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Unpack, overload

from planner.api.options import Options
from planner.api.request import (
    Model,
    batch_of,
    budget_of,
    calibrate_budget,
    checked_multiple,
    ignore_progress,
    refuse_no_card,
    workload_of,
)
from planner.errors import UsageError, unsaved
from planner.jobs import check_count
from planner.planning import (
    LARGEST_BATCH,
    Estimate,
    Plan,
    TraceSource,
    Workload,
    check_batch,
    estimate as estimate_batch,
    over_epoch,
    plan_max_batch,
    save_workload,
)
from planner.planning.estimators import Method, find_method
from planner.report import Result

if TYPE_CHECKING:
    from planner.api.compare import FormulaBatchResult, StaticEstimateResult


@dataclass(frozen=True, slots=True)
class MaxBatchResult(Result):
    """The largest batch size; `str` gives the text report."""

    plan: Plan
    import_seconds: float

    @property
    def answer_batch(self) -> int:
        """The batch size that the report leads with: `comfortable_batch`, or where no batch runs without
        retries, `max_batch`; with `no_retries`, 0 there.
        """
        return 0 if self.plan.answer is None else self.plan.answer.run.batch

    @property
    def max_batch(self) -> int:
        """The largest that fits at all, with retries or without; 0 where not even 1 fits."""
        return self.plan.search.largest

    @property
    def comfortable_batch(self) -> int:
        """The largest batch size that fits without releasing cached memory on the way."""
        return self.plan.search.comfortable


@dataclass(frozen=True, slots=True)
class EstimateResult(Result):
    """The memory of one batch size; `str` gives the text report."""

    estimate: Estimate
    import_seconds: float

    @property
    def fits(self) -> str:
        """`yes`, `with_retries` or `no`."""
        return self.estimate.outcome.value


@overload
def max_batch(
    model: Model | None = None,
    *,
    multiple_of: int | None = None,
    no_retries: bool | None = None,
    **options: Unpack[Options],
) -> MaxBatchResult: ...


@overload
def max_batch(
    model: Model | None = None,
    *,
    method: str | None,
    multiple_of: int | None = None,
    no_retries: bool | None = None,
    **options: Unpack[Options],
) -> "MaxBatchResult | FormulaBatchResult": ...


def max_batch(
    model: Model | None = None,
    *,
    method: str | None = None,
    multiple_of: int | None = None,
    no_retries: bool | None = None,
    **options: Unpack[Options],
) -> "MaxBatchResult | FormulaBatchResult":
    """The largest batch size of a model that fits a GPU.

    `model` is a name as `--model` takes it, a callable that returns an `nn.Module`, or a `Job`; with `trace`
    it is left away. One of `gpu`, `gpu_mib` and `allocator_cap_mib` is needed. `method` is "trace" or
    "formula". With `multiple_of`, the answer is the largest such multiple that fits. With `no_retries`, a
    batch size for which the allocator has to release cached memory is no answer. Raises the errors of
    `planner.errors`, among them UnsavedError, which holds the result, where `save_trace` cannot be written;
    that nothing fits is a result.
    """
    multiple = checked_multiple(multiple_of)
    if find_method(method, (Method.TRACE, Method.FORMULA)) is Method.FORMULA:
        if multiple > 1:
            raise UsageError(
                "--multiple-of and --method formula: the formula answers for any size; leave one"
            )
        from planner.api.compare import max_batch_by_formula

        if no_retries:
            raise UsageError("--no-retries: the formula knows no allocator; leave it away, or --method")
        return max_batch_by_formula(model, options)
    refuse_no_card(options)
    budget = budget_of(options)
    start = perf_counter()  # some sources import their library to know the inputs
    workload = workload_of(model, options, budget)
    budget = calibrate_budget(budget, workload.job, options)
    on_progress = options.get("on_progress") or ignore_progress
    tracer = workload.open(on_progress)
    import_seconds = perf_counter() - start
    plan = plan_max_batch(workload.job, budget, tracer, on_progress, multiple)
    result = MaxBatchResult(replace(plan, no_retries=bool(no_retries)), import_seconds)
    _save(result, workload, tracer, plan.search.largest or 1, options)
    return result


@overload
def estimate(
    model: Model | None = None, batch: int | None = None, **options: Unpack[Options]
) -> EstimateResult: ...


@overload
def estimate(
    model: Model | None = None, batch: int | None = None, *, method: str | None, **options: Unpack[Options]
) -> "EstimateResult | StaticEstimateResult": ...


def estimate(
    model: Model | None = None,
    batch: int | None = None,
    *,
    method: str | None = None,
    **options: Unpack[Options],
) -> "EstimateResult | StaticEstimateResult":
    """The memory of one batch size of a model, and whether it fits; without a GPU, on one without end.

    `model` is as for `max_batch`. `batch` is by default that of the catalogue or of the trace file.
    `method` is one of `planner.planning.estimators.Method`. Raises the errors of `planner.errors`; that the
    batch does not fit is a result.
    """
    if batch is not None:
        check_count("--batch", batch, LARGEST_BATCH)
    chosen = find_method(method)
    if chosen is not Method.TRACE:
        from planner.api.compare import estimate_statically

        return estimate_statically(chosen, model, batch, options)
    budget = budget_of(options)
    start = perf_counter()
    workload = workload_of(model, options, budget)
    budget = calibrate_budget(budget, workload.job, options)
    size = batch_of(batch, workload.batch, workload.job)
    check_batch(workload.job, size)
    on_progress = options.get("on_progress") or ignore_progress
    tracer = workload.open(on_progress)
    opened = perf_counter()
    on_progress(f"tracing batch {size}")
    trace = over_epoch(workload.job, size, tracer)
    found = estimate_batch(workload.job, trace, size, budget, perf_counter() - opened)
    result = EstimateResult(found, opened - start)
    _save(result, workload, tracer, size, options)
    return result


def _save(result: object, workload: Workload, tracer: TraceSource, batch: int, options: Options) -> None:
    path = options.get("save_trace")
    if path is None:
        return
    with unsaved(result):
        save_workload(workload, tracer, batch, Path(path), options.get("on_progress") or ignore_progress)
