"""Estimate memory by each method except the planner's trace: the formula and other tools.

torch is imported on the first use of an estimator.
"""

from time import perf_counter
from typing import Any

from planner.errors import PlannerError, UsageError
from planner.hardware import Budget
from planner.jobs import Job, trains_itself
from planner.planning.estimators.methods import Method
from planner.planning.estimators.peers import Build
from planner.planning.estimators.static_estimate import (
    FormulaPlan,
    StaticEstimate,
    formula_estimate,
    formula_plan,
    moments_of,
    peer_estimate,
)
from planner.planning.programs import Factory
from planner.program import OnProgress

OTHER_METHODS = tuple(method for method in Method if method is not Method.TRACE)


def model_builder(job: Job, factory: Factory | None, on_progress: OnProgress) -> Build:
    """Import torch, and return a function that builds a job's model without weights.

    Raises UsageError if the model's source does not know the model. The returned function raises UsageError
    for a model that has its own training step.
    """
    on_progress("importing torch and the model's library")
    from planner.capture import construct_model, find_constructor

    constructor = factory or find_constructor(job)

    def build(job: Job) -> Any:  # an nn.Module
        if trains_itself(job):
            raise UsageError(
                f"{job.model.name}: its own training step is run by the trace alone; use --method trace"
            )
        return construct_model(job, constructor)

    return build


def run_estimator(
    method: Method, job: Job, batch: int, budget: Budget, build: Build, on_progress: OnProgress
) -> StaticEstimate:
    """Estimate the memory of one batch size by a method other than the trace.

    Raises UsageError for a job that the method has no term for, and ModelError if the method fails.
    """
    on_progress(f"estimating by {method}")
    from planner.capture import live_modules_restored

    start = perf_counter()
    if method is Method.FORMULA:
        from planner.planning.estimators.torch_runners.layer_table import formula_counts

        moments_of(job)
        with live_modules_restored():
            counts = formula_counts(job, batch, build)
        return formula_estimate(job, batch, budget, counts, perf_counter() - start)
    from planner.planning.estimators.torch_runners.peers import PEERS

    with live_modules_restored():
        peer = PEERS[method](job, batch, build)
    return peer_estimate(method, job, batch, budget, peer, perf_counter() - start)


def plan_by_formula(job: Job, budget: Budget, build: Build, on_progress: OnProgress) -> FormulaPlan:
    """Find the largest batch size by the closed formula. Raises the errors that `run_estimator` raises."""
    from planner.capture import live_modules_restored
    from planner.planning.estimators.torch_runners.layer_table import affine_formula_counts

    on_progress("estimating by the formula")
    start = perf_counter()
    moments_of(job)
    with live_modules_restored():
        counts = affine_formula_counts(job, build)
    return formula_plan(job, budget, counts, perf_counter() - start)


def run_estimators(
    job: Job, batch: int, budget: Budget, build: Build, on_progress: OnProgress
) -> dict[Method, StaticEstimate | str]:
    """Return the estimate of each method except the trace, or the text of its error if the method fails."""
    answers: dict[Method, StaticEstimate | str] = {}
    for method in OTHER_METHODS:
        try:
            answers[method] = run_estimator(method, job, batch, budget, build, on_progress)
        except PlannerError as error:
            answers[method] = _reason(job, error)
    return answers


def _reason(job: Job, error: PlannerError) -> str:
    """Return an error's text without the model's name and the advice to use the trace."""
    text = str(error).removeprefix(f"{job.model.name}: ")
    for advice in ("; use --method trace", ", or use --method trace"):
        text = text.removesuffix(advice)
    return text
