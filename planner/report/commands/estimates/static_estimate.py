"""The reports of estimates that do not use a trace."""

from typing import Any

from planner.jobs import Mode
from planner.planning import Seconds
from planner.planning.estimators import (
    MEBIBYTE_BYTES,
    TITLES,
    FormulaPlan,
    Method,
    StaticEstimate,
)
from planner.report.budget import budget_table, job_to_report
from planner.report.commands.estimates.estimate import plan_seconds_to_json
from planner.report.describe import job_entry
from planner.report.document import Bullets, Document, Entry, Headline, Paragraph, Style, Table
from planner.report.units import memory_table, mib, mib_text, timing_line

_REMARKS = {"Weight gradient": "with the optimizer's moments", "Output gradient": "with that of the batch"}
_COUNTS = {
    Method.FORMULA: "the formula counts tensors only: the batch, weights and outputs of layers that do not "
    "work in place, and their gradients, all at once; no workspaces, no fragmentation",
    Method.TORCHINFO: "torchinfo counts the batch, the weights of leaves and twice the outputs of leaves "
    "with weights; neither optimizer nor loop",
    Method.TORCHSUMMARY: "torchsummary counts the batch, weights and biases, and twice the outputs of all "
    "modules, in-place activations and whole blocks included; neither optimizer nor loop",
    Method.MODELSIZE: "pytorch_modelsize counts the batch, the weights of the last module and twice the "
    "outputs of the modules, run one after the other; neither optimizer nor loop",
    Method.MEMTRACKER: "MemTracker counts the tensors that are alive, by the CPU's kernels (fake tensors of "
    "CUDA need a GPU): no workspaces, no allocator",
}


def static_estimate_document(estimate: StaticEstimate, import_seconds: float) -> Document:
    """Return the report of `planner estimate` if the method is not the trace."""
    is_bounded = estimate.budget.limits.allocator_limit_bytes is not None
    style: Style = "neutral" if not is_bounded else "good" if estimate.fits else "bad"
    return Document.of(
        [Headline((_verdict(estimate), job_entry(estimate.job)), style)],
        [budget_table(estimate.budget)] if is_bounded else [],
        [_terms(estimate)],
        _closing(estimate, estimate.seconds, import_seconds),
    )


def formula_plan_document(plan: FormulaPlan, import_seconds: float) -> Document:
    """Return the report of `planner max-batch --method formula`."""
    shown, failure = plan.at_max or plan.first_failure, plan.first_failure
    largest = f"{plan.max_batch}" if plan.max_batch else "none, not even 1 fits"
    answer = Entry("Largest batch", f"{largest} by the closed formula")
    beyond = f"Batch {failure.batch} does not fit: the formula's total is {mib_text(failure.total_bytes)} MiB"
    return Document.of(
        [Headline((answer, job_entry(plan.job)), "good" if plan.max_batch else "bad")],
        [budget_table(plan.budget)],
        [_terms(shown)],
        [] if plan.at_max is None else [Headline((beyond,), "bad")],
        _closing(shown, plan.seconds, import_seconds),
    )


def _verdict(estimate: StaticEstimate) -> str:
    title, taken = TITLES[estimate.method], f"{mib_text(estimate.total_bytes)} MiB"
    if estimate.budget.limits.allocator_limit_bytes is None:
        return f"Batch {estimate.batch} takes {taken} by {title}"
    fits = "fits" if estimate.fits else "does not fit"
    return f"Batch {estimate.batch} {fits} by {title}, which estimates {taken}"


def _terms(estimate: StaticEstimate) -> Table:
    return memory_table(
        f"Batch {estimate.batch}", [(name, size, _remark(estimate, name)) for name, size in estimate.lines]
    )


def _remark(estimate: StaticEstimate, name: str) -> str:
    if estimate.method is Method.FORMULA:
        return _REMARKS.get(name, "")
    if name == "Total" and estimate.unit_bytes != MEBIBYTE_BYTES:
        printed = estimate.total_bytes / estimate.unit_bytes
        return f"printed as {printed:,.2f} MB of {estimate.unit_bytes:,} bytes"
    return ""


def _closing(estimate: StaticEstimate, seconds: float, import_seconds: float) -> list[Bullets | Paragraph]:
    timing = timing_line(importing=import_seconds, estimating=seconds)
    return [Bullets("Assumed", static_assumptions(estimate)), timing]


def static_assumptions(estimate: StaticEstimate) -> tuple[str, ...]:
    """Return sentences on the assumptions of an estimate that does not use a trace."""
    sure = f"{estimate.budget.confidence:g}"
    held = (
        "the total is held against what the GPU leaves to the allocator, as the method knows neither "
        f"context nor allocator; confidence {sure} is in the GPU's figures, not in the total"
    )
    mode = estimate.job.loop.mode
    ignores = estimate.method not in (Method.FORMULA, Method.MEMTRACKER) and mode is not Mode.TRAIN
    return (
        _COUNTS[estimate.method],
        *((f"the total is for training, and the job is not: {mode}",) if ignores else ()),
        *((held,) if estimate.budget.limits.allocator_limit_bytes is not None else ()),
        "docs/formulas.md lists its errors; --method trace knows the allocator and the loop",
    )


def static_estimate_to_json(estimate: StaticEstimate, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner estimate` if the method is not the trace.

    Values that such a method does not know are null. `peak_allocated_mib` is the estimator's total, and
    `terms_mib` has the terms of the sum under the estimator's names.
    """
    sizes = ("peak_reserved_mib", "end_allocated_mib", "process_mib", "process_upper_mib")
    return {
        **job_to_report(estimate.job, estimate.budget),
        "batch": estimate.batch,
        "method": estimate.method.value,
        "peak_allocated_mib": mib(estimate.total_bytes),
        "terms_mib": {name.lower().replace(" ", "_"): mib(size) for name, size in estimate.lines},
        "fits": "yes" if estimate.fits else "no",
        **dict.fromkeys((*sizes, "p_out_of_memory", "retries", "failure", "breakdown_mib", "calibration")),
        "assumptions": list(static_assumptions(estimate)),
        "unknown_ops": None,
        "seconds": plan_seconds_to_json(Seconds(estimate.seconds, 0.0), import_seconds),
    }


def formula_plan_to_json(plan: FormulaPlan, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner max-batch --method formula`.

    It has no probes and no results on retries.
    """
    at_max = plan.at_max and static_estimate_to_json(plan.at_max, import_seconds)
    return {
        **job_to_report(plan.job, plan.budget),
        "method": Method.FORMULA.value,
        "max_batch": plan.max_batch,
        "comfortable_batch": None,
        "no_retries": False,
        "answer_batch": plan.max_batch,
        "at_max": at_max,
        "at_comfortable": None,
        "first_failure": static_estimate_to_json(plan.first_failure, import_seconds),
        "probes": [],
        "seconds": plan_seconds_to_json(Seconds(plan.seconds, 0.0), import_seconds),
    }
