"""The report of `planner max-batch`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.planning import Answer, Estimate, Plan
from planner.planning.estimators import Method
from planner.program import LARGEST_BATCH
from planner.report.budget import budget_table, job_to_report
from planner.report.commands.estimates.estimate import estimate_to_json, plan_seconds_to_json
from planner.report.commands.estimates.tables import batch_table, closing_section, memory_sections
from planner.report.commands.estimates.verdict import (
    batch_answer,
    exit_entries,
    failure_entries,
    left_out_entries,
    likely_text,
    retries_text,
    risk_entries,
    scarce_text,
    style_of,
    unlimited_text,
    until_text,
)
from planner.report.describe import job_entry
from planner.report.document import Block, Document, Entry, Headline, Lines, Style
from planner.report.units import attributes, to_builtins

if TYPE_CHECKING:
    from planner.planning.command import CommandPlan


def plan_document(plan: Plan, import_seconds: float) -> Document:
    """Return the report of `planner max-batch`."""
    shown = plan.answer or plan.at_max or plan.first_failure
    style: Style = "bad" if plan.answer is None else style_of(plan.answer)
    sections: list[list[Block]] = [
        [Headline((*_headline(plan), *_multiple(plan), *left_out_entries(shown), job_entry(plan.job)), style)]
    ]
    if shown is not None:
        sections += [[budget_table(plan.budget)], *memory_sections(shown)]
    if plan.with_retries not in (None, shown):
        sections.append([batch_table(plan.with_retries)])
    if plan.at_max is not None and plan.first_failure is not None:
        sections.append([_beyond(plan.first_failure, plan.search.largest)])
    return Document.of(*sections, closing_section(shown, plan.seconds, import_seconds))


def _headline(plan: Plan) -> Lines:
    """Return lines with the largest batch, or with the reason why no batch fits."""
    search, sure = plan.search, f"at confidence {plan.budget.confidence:g}"
    if plan.at_max is None and plan.largest_of_any_size:
        return [Entry("Largest batch", f"none {sure} that is a multiple of {plan.multiple_of}")]
    if plan.at_max is None:
        failure = plan.first_failure
        failed = [] if failure is None else [*failure_entries(failure), *risk_entries(failure)]
        none = none_text(str(search.least), failure, smallest_trains=search.least > 1)
        return [Entry("Largest batch", f"none {sure}, {none}"), *failed, *exit_entries(failure)]
    if search.first_failure is None and search.largest >= LARGEST_BATCH:
        end = f"{search.largest}, where the search ends: memory hardly depends on it"
        return [Entry("Largest batch", end)]
    lead, retrying = plan.answer, plan.with_retries
    lines: Lines
    if lead is None:
        lines = [Entry("Largest batch", f"none without retries {sure}")]
    else:
        end = ", the largest that is planned" if plan.first_failure is None else ""
        whole = ", the whole epoch" if lead.run.batch == plan.job.samples.dataset_size else end
        how = ", without retries" if plan.at_comfortable is not None else retrying_remark(lead)
        remark = "" if retrying is None else how
        lines = [Entry("Largest batch", f"{lead.run.batch}{whole} {sure}{remark}{until_text(lead)}")]
    if retrying is not None:
        lines.append(retrying_entry(str(retrying.run.batch), retrying))
    return [*lines, *risk_entries(*(estimate for estimate in (lead, retrying) if estimate is not None))]


def none_text(least: str, failure: Estimate | None, *, smallest_trains: bool) -> str:
    """Return a phrase on `least`, the smallest batch or size, which does not fit at the confidence.

    `least` is the batch or size as text. The phrase says that it likely fits, that it is not known whether it
    fits, or that it does not fit.
    """
    why = ", the smallest that trains" if smallest_trains else ""
    if failure is not None and failure.answer is Answer.LIKELY:
        return f"though {least} likely fits ({likely_text(failure.p_out_of_memory)}){why}"
    if failure is not None and failure.answer is Answer.NOT_KNOWN:
        return f"and it is not known whether {least} fits{why}"
    return f"not even {least} fits{why}"


def retrying_remark(lead: Estimate) -> str:
    """Return the remark that no batch or size runs, or is sure to run, without retries.

    Retries are certain if the estimate `lead` has retry costs.
    """
    return ", none runs without retries" if lead.retry_costs else ", none is sure to run without retries"


def retrying_entry(largest: str, retrying: Estimate) -> Entry:
    """Return an entry with the largest batch or size that fits with retries.

    The retries are expected or only possible.
    """
    if retrying.retry_costs:
        cost = f"at the cost of retries: {retries_text(retrying.retry_costs)}"
        return Entry("With retries", f"{largest}, {cost}")
    costs = retrying.retry_costs_at_confidence
    scarce = f"; {scarce_text(retrying)}, {retries_text(costs)}" if costs else ""
    return Entry("With retries", f"{largest}, none expected{scarce}")


def _multiple(plan: Plan) -> Lines:
    """Return an entry with `multiple_of` and the largest batch of any size, or [] if `multiple_of` is 1."""
    if plan.multiple_of == 1:
        return []
    fits, at_ease = plan.largest_of_any_size, plan.comfortable_of_any_size
    which = f"{at_ease} fits without retries, {fits} with" if at_ease < fits else f"{fits or 'none'} fits"
    return [Entry("Multiple of", f"{plan.multiple_of}; of any size, {which}")]


def _beyond(failure: Estimate, largest: int) -> Headline:
    """Return a headline on the smallest batch that fails at the confidence, and where it fails."""
    odd = ", though larger ones do" if failure.run.batch < largest else ""
    if failure.answer is not Answer.DOES_NOT_FIT:
        answer = f"{batch_answer(failure)}, not at confidence {failure.budget.confidence:g}{odd}"
        return Headline((answer, *failure_entries(failure)), "warning")
    without = unlimited_text(failure) if failure.is_unlimited else ""
    answer = f"{batch_answer(failure)}{odd}{without}"
    return Headline((answer, *failure_entries(failure)), "bad")


def plan_to_json(plan: Plan, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner max-batch`. `probes` has the outcome of each batch tried."""
    return {
        **job_to_report(plan.job, plan.budget),
        "method": Method.TRACE.value,
        **search_to_json(plan, lambda estimate: estimate_to_json(estimate, import_seconds)),
        **attributes(plan, "multiple_of", "no_retries"),
        "answer_batch": 0 if plan.answer is None else plan.answer.run.batch,
        "seconds": plan_seconds_to_json(plan.seconds, import_seconds),
    }


def search_to_json(plan: "Plan | CommandPlan", nested: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON entries of a search for the largest batch; `nested` converts each estimate or run."""
    sides = {name: getattr(plan, name) for name in ("at_max", "at_comfortable", "first_failure")}
    return {
        "max_batch": plan.search.largest,
        "comfortable_batch": plan.search.comfortable,
        **{name: None if side is None else nested(side) for name, side in sides.items()},
        "probes": to_builtins(plan.search.probes),
    }
