"""`planner.serve`: how many sequences a model server holds on a GPU.

The server has a paged key-value cache.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Any, Unpack

from planner.api.request.budget import find_budget, require_memory_limit
from planner.api.request.options import Options
from planner.api.request.request import make_job
from planner.planning import ServingPlan, ServingSettings, plan_serving
from planner.program import ignore_progress
from planner.report import Report, Result, report_of


@dataclass(frozen=True, slots=True)
class ServeResult(Result):
    """The numbers of cache blocks, tokens and sequences that a model server holds on a GPU.

    `str` gives the text report.
    """

    plan: ServingPlan
    seconds: float

    @property
    def sequences(self) -> int:
        """Return the number of sequences of the configured length that run at once, or 0 if none fits."""
        return self.plan.sequences

    def _report(self) -> Report:
        from planner.report import serving_document, serving_to_json

        return report_of(serving_document, serving_to_json, self.plan, self.seconds)


def serve(
    model: str | None = None, *, draft: str | None = None, settings: Any = None, **options: Unpack[Options]
) -> ServeResult:
    """Return how many cache blocks, tokens and sequences a model server holds on a GPU.

    The rules are vLLM's. `draft` is the smaller model of speculative decoding, whose weights and cache are
    counted too. `settings` is a mapping with the fields of `planner.planning.ServingSettings`. Raises
    UsageError or ModelError; 0 sequences is a result, not an error.
    """
    start = perf_counter()
    require_memory_limit(options)
    checked = ServingSettings(**(settings or {})).check()
    budget = find_budget(options)
    (options.get("on_progress") or ignore_progress)("building the model")
    job, _, _ = make_job(model, options)
    from planner.capture import served_model

    served = served_model(job)
    served_draft = None
    if draft is not None:
        plain: Options = {**options, "model_arg": {}}
        served_draft = served_model(make_job(draft, plain)[0])
    return ServeResult(plan_serving(served, served_draft, budget.device, checked), perf_counter() - start)
