"""The report of `planner max-batch`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.planning import Estimate, Plan
from planner.planning.estimators import Method
from planner.program import LARGEST_BATCH
from planner.report.budget import budget_table, job_to_report
from planner.report.commands.estimate import (
    STYLES,
    Lines,
    batch_table,
    closing_section,
    estimate_to_json,
    failure_entries,
    memory_sections,
    plan_seconds_to_json,
    retries_text,
    risk_entries,
)
from planner.report.describe import job_entry
from planner.report.document import Block, Document, Entry, Headline, Style
from planner.report.units import attributes, mib_text, to_builtins

if TYPE_CHECKING:
    from planner.planning.command import CommandPlan


def plan_document(plan: Plan, import_seconds: float) -> Document:
    """Return the report of `planner max-batch`."""
    shown = plan.answer or plan.at_max or plan.first_failure
    style: Style = "bad" if plan.answer is None else STYLES[plan.answer.outcome]
    sections: list[list[Block]] = [
        [Headline((*_headline(plan), *_multiple(plan), job_entry(plan.job)), style)]
    ]
    if shown is not None:
        sections += [[budget_table(plan.budget)], *memory_sections(shown)]
    if plan.with_retries not in (None, shown):
        sections.append([batch_table(plan.with_retries)])
    if plan.at_max is not None and plan.first_failure is not None:
        sections.append([_beyond(plan.first_failure, plan.search.largest)])
    return Document.of(*sections, closing_section(shown, plan.seconds, import_seconds))


def _headline(plan: Plan) -> Lines:
    """Return the largest batch, or why there is none."""
    search, sure = plan.search, f"at confidence {plan.budget.confidence:g}"
    if plan.at_max is None and plan.largest_of_any_size:
        return [Entry("Largest batch", f"none {sure} that is a multiple of {plan.multiple_of}")]
    if plan.at_max is None:
        failed = [] if plan.first_failure is None else failure_entries(plan.first_failure)
        return [Entry("Largest batch", f"none {sure}, {none_text(search.least)}"), *failed]
    if search.first_failure is None and search.largest >= LARGEST_BATCH:
        end = f"{search.largest}, where the search ends: memory hardly depends on it"
        return [Entry("Largest batch", end)]
    lead, retrying = plan.answer, plan.with_retries
    lines: Lines
    if lead is None:
        lines = [Entry("Largest batch", f"none without retries {sure}")]
    else:
        whole = ", the whole epoch" if lead.run.batch == plan.job.dataset_size else ""
        how = ", without retries" if plan.at_comfortable is not None else ", none runs without retries"
        remark = "" if retrying is None else how
        lines = [Entry("Largest batch", f"{lead.run.batch}{whole} {sure}{remark}")]
    if retrying is not None:
        cost = f"{retrying.run.batch}, at the cost of retries: {retries_text(retrying.retry_costs)}"
        lines.append(Entry("With retries", cost))
    return [*lines, *risk_entries(*(estimate for estimate in (lead, retrying) if estimate is not None))]


def none_text(least: int) -> str:
    """Return that not even the smallest batch size fits.

    >>> none_text(1), none_text(2)
    ('not even 1 fits', 'not even 2 fits, the smallest that trains')
    """
    return f"not even {least} fits" + (", the smallest that trains" if least > 1 else "")


def _multiple(plan: Plan) -> Lines:
    """Return of which number the answer is a multiple, and what fits of any size."""
    if plan.multiple_of == 1:
        return []
    fits, at_ease = plan.largest_of_any_size, plan.comfortable_of_any_size
    which = f"{at_ease} fits without retries, {fits} with" if at_ease < fits else f"{fits or 'none'} fits"
    return [Entry("Multiple of", f"{plan.multiple_of}; of any size, {which}")]


def _beyond(failure: Estimate, largest: int) -> Headline:
    """Return the memory of the smallest batch that does not fit, and the place of its failure."""
    odd = ", though larger ones do" if failure.run.batch < largest else ""
    process = f"{mib_text(failure.process_bytes)} MiB"
    answer = f"Batch {failure.run.batch} does not fit{odd}; without a limit it would take {process}"
    return Headline((answer, *failure_entries(failure)), "bad")


def plan_to_json(plan: Plan, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner max-batch`; `probes` has the `fits` of each batch tried."""
    return {
        **job_to_report(plan.job, plan.budget),
        "method": Method.TRACE.value,
        **search_to_json(plan, lambda estimate: estimate_to_json(estimate, import_seconds)),
        **attributes(plan, "multiple_of", "no_retries"),
        "answer_batch": 0 if plan.answer is None else plan.answer.run.batch,
        "seconds": plan_seconds_to_json(plan.seconds, import_seconds),
    }


def search_to_json(plan: "Plan | CommandPlan", nested: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return the keys that both kinds of searches have; `nested` writes a batch size on either side."""
    sides = {name: getattr(plan, name) for name in ("at_max", "at_comfortable", "first_failure")}
    return {
        "max_batch": plan.search.largest,
        "comfortable_batch": plan.search.comfortable,
        **{name: None if side is None else nested(side) for name, side in sides.items()},
        "probes": to_builtins(plan.search.probes),
    }
