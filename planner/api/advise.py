"""`planner advise` for Python: the smallest changes to a recipe that make a batch fit."""

from dataclasses import dataclass
from time import perf_counter
from typing import Unpack

from planner.api.options import Options
from planner.api.request import (
    Model,
    batch_of,
    budget_of,
    calibrate_budget,
    ignore_progress,
    job_of,
    refuse_no_card,
)
from planner.capture.subprocess import refuse_isolation
from planner.errors import UsageError
from planner.jobs import check_count
from planner.planning import (
    LARGEST_BATCH,
    Advice,
    Factory,
    OnProgress,
    Open,
    Recipe,
    TraceSource,
    advise as advise_on,
    check_batch,
    trace_workload,
)
from planner.program import Target
from planner.report import Result


@dataclass(frozen=True, slots=True)
class AdviceResult(Result):
    """What makes the batch fit; `str` gives the text report."""

    advice: Advice
    import_seconds: float

    @property
    def possible(self) -> bool:
        """Whether the batch fits as it is or with any set of changes."""
        return self.advice.unchanged.fits or bool(self.advice.sets)


def advise(model: Model | None = None, batch: int | None = None, **options: Unpack[Options]) -> AdviceResult:
    """The smallest sets of changes with which a batch size of a model fits a GPU.

    `model`, `batch` and the options are as for `planner.estimate`; a GPU or a cap is needed. Each set is
    traced and replayed. Raises the errors of `planner.errors`; that nothing helps is a result.
    """
    if batch is not None:
        check_count("--batch", batch, LARGEST_BATCH)
    refuse_no_card(options)
    refuse_isolation(options, "advise")
    if options.get("trace") is not None or options.get("save_trace") is not None:
        raise UsageError(
            "advise traces many recipes: --trace and --save-trace mean nothing to it; leave them away"
        )
    on_progress = options.get("on_progress") or ignore_progress
    budget = budget_of(options)
    start = perf_counter()
    job, known, factory = job_of(model, options)
    size = batch_of(batch, known, job)
    check_batch(job, size)
    budget = calibrate_budget(budget, job, options)
    open_tracer = _opener(factory, budget.device.target, on_progress)
    recipe = Recipe(job, size, budget.arena.rules)
    open_tracer(recipe)  # imports what is needed
    import_seconds = perf_counter() - start
    return AdviceResult(advise_on(recipe, budget, open_tracer, on_progress), import_seconds)


def _opener(factory: Factory | None, chip: Target, on_progress: OnProgress) -> Open:
    def open_tracer(recipe: Recipe) -> TraceSource:
        return trace_workload(recipe.job, None, factory, chip).open(on_progress)

    return open_tracer
