"""`planner.serve`: the sequences that a server with a paged key-value cache holds beside the weights."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any, Unpack

from planner.api.budget import make_budget, require_memory_limit
from planner.api.options import Options
from planner.api.request import make_job
from planner.planning import ServingPlan, ServingSettings, plan_serving
from planner.program import ignore_progress
from planner.report import Result


@dataclass(frozen=True, slots=True)
class ServeResult(Result):
    """The blocks, tokens and sequences of a server; `str` gives the text report."""

    plan: ServingPlan
    seconds: float

    @property
    def sequences(self) -> int:
        """The sequences of the length that run at once; 0 where not one fits."""
        return self.plan.sequences


def serve(
    model: str | None = None, *, draft: str | None = None, settings: Any = None, **options: Unpack[Options]
) -> ServeResult:
    """Return what a server holds of a causal language model, computed by vLLM's rules.

    `draft` is the smaller model of speculative decoding, whose weights and cache lie beside. `settings` are
    the fields of `planner.planning.ServingSettings`, as a mapping. Raises UsageError or ModelError; that
    nothing fits is a result.
    """
    start = perf_counter()
    require_memory_limit(options)
    checked = ServingSettings(**(settings or {})).check()
    budget = make_budget(options)
    (options.get("on_progress") or ignore_progress)("building the model")
    job, _, _ = make_job(model, options)
    from planner.capture import served_model

    served = served_model(job)
    beside = None
    if draft is not None:
        plain: Options = {**options, "model_arg": {}}
        beside = served_model(make_job(draft, plain)[0])
    return ServeResult(plan_serving(served, beside, budget.device, checked), perf_counter() - start)
