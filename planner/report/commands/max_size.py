"""The report of `planner max-size`."""

from typing import Any

from planner.jobs import Size
from planner.planning import Answer, Estimate, SizePlan
from planner.report.budget import budget_table, job_to_report
from planner.report.commands.estimates.estimate import estimate_to_json, plan_seconds_to_json
from planner.report.commands.estimates.tables import batch_table, closing_section, memory_sections
from planner.report.commands.estimates.verdict import (
    exit_entries,
    failure_entries,
    likely_text,
    risk_entries,
    style_of,
    unlimited_text,
)
from planner.report.commands.max_batch import none_text, retrying_entry, retrying_remark
from planner.report.describe import job_entry
from planner.report.document import Block, Document, Entry, Headline
from planner.report.units import sides_text


def max_size_document(plan: SizePlan, import_seconds: float) -> Document:
    """Return the report of `planner max-size`."""
    lead = plan.at_comfortable or plan.at_max
    shown = lead or plan.first_failure
    sections: list[list[Block]] = [[_headline(plan)]]
    if shown is not None:
        sections += [[budget_table(shown.budget)], *memory_sections(shown)]
    if lead is not None and plan.at_max not in (None, lead):
        sections.append([batch_table(plan.at_max)])
    if lead is not None and plan.first_failure is not None and plan.failing is not None:
        sections.append([_beyond(plan.first_failure, plan.failing)])
    return Document.of(*sections, closing_section(shown, plan.seconds, import_seconds))


def _headline(plan: SizePlan) -> Headline:
    sure = f"at batch {plan.batch} and confidence {plan.budget.confidence:g}"
    lead = plan.at_comfortable or plan.at_max
    if lead is None:
        failure = plan.first_failure
        failed = [] if failure is None else [*failure_entries(failure), *risk_entries(failure)]
        none = none_text(sides_text(plan.sizes[0]), failure, smallest_trains=bool(plan.refusal))
        least = Entry("Largest size", f"none {sure}, {none}")
        return Headline((least, *failed, *exit_entries(failure), job_entry(plan.job)), "bad")
    size = plan.comfortable or plan.largest or ()
    limit = "the largest that the model takes" if plan.refusal_of_larger else "where the search ends"
    end = f", {limit}" if size == plan.sizes[-1] else ""
    how = "" if plan.comfortable == plan.largest else ", without retries"
    how = retrying_remark(lead) if plan.comfortable is None else how
    lines = [Entry("Largest size", f"{sides_text(size)} {sure}{how}{end}")]
    retrying = None if plan.comfortable == plan.largest else plan.at_max
    if retrying is not None and plan.largest is not None:
        lines.append(retrying_entry(sides_text(plan.largest), retrying))
    return Headline((*lines, *risk_entries(lead), job_entry(lead.job)), style_of(lead))


def _beyond(failure: Estimate, size: Size) -> Headline:
    answer = f"Size {sides_text(size)} does not fit{unlimited_text(failure)}"
    if failure.answer is Answer.LIKELY:
        likely = likely_text(failure.p_out_of_memory)
        answer = f"Size {sides_text(size)} likely fits ({likely}), not at the confidence"
    elif failure.answer is Answer.NOT_KNOWN:
        answer = f"It is not known whether size {sides_text(size)} fits"
    return Headline((answer, *failure_entries(failure)), "bad")


def max_size_to_json(plan: SizePlan, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner max-size`. `probes` has the outcome of each size tried."""
    sides = {name: getattr(plan, name) for name in ("at_max", "at_comfortable", "first_failure")}
    sizes = {"max_size": plan.largest, "comfortable_size": plan.comfortable}
    sizes |= {"answer_size": plan.comfortable or plan.largest}
    return {
        **job_to_report(plan.job, plan.budget),
        "batch": plan.batch,
        **{name: None if size is None else list(size) for name, size in sizes.items()},
        "smallest": list(plan.sizes[0]),
        "largest": list(plan.sizes[-1]),
        **{
            name: None if side is None else estimate_to_json(side, import_seconds)
            for name, side in sides.items()
        },
        "probes": [[list(plan.sizes[number - 1]), fits.value] for number, fits in plan.search.probes],
        "seconds": plan_seconds_to_json(plan.seconds, import_seconds),
    }
