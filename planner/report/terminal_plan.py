"""`planner max-batch` and `planner estimate` on a terminal."""

from rich.console import RenderableType

from planner.planning import Estimate, Plan
from planner.report.assumptions import of_run
from planner.report.commands.max_batch import (
    answer_lines,
    beyond_lines,
    memory_rows,
    multiple_lines,
    shown_first,
    step_lines,
    took,
    verdict,
)
from planner.report.layout import DIGITS, NAMES, card_rows, entry, job_text
from planner.report.plots.colours import PART_COLOURS
from planner.report.terminal import TONES, bar, bullets, faint, headline, memory_table, stacked
from planner.report.terminal_table import Column, NarrowingTable
from planner.report.units import breakdown, shares


def max_batch_view(plan: Plan, import_seconds: float) -> RenderableType:
    """The report of `planner max-batch`."""
    shown = shown_first(plan)
    tone = TONES[plan.answer.outcome] if plan.answer is not None else "red"
    parts: list[RenderableType] = [
        headline([*answer_lines(plan), *multiple_lines(plan), *entry("Job", job_text(plan.job))], tone)
    ]
    if shown is not None:
        parts += _figures(shown)
    if plan.with_retries not in (None, shown):
        parts.append(memory_table(*memory_rows(plan.with_retries)))
    if plan.at_max is not None and plan.first_failure is not None:
        parts.append(headline(beyond_lines(plan.first_failure, plan.search.largest), "red"))
    if shown is not None:
        parts.append(bullets("Assumed", of_run(shown)))
    return stacked([*parts, faint(took(plan.seconds, import_seconds))])


def estimate_view(estimate: Estimate, import_seconds: float) -> RenderableType:
    """The report of `planner estimate`."""
    parts = [headline([*verdict(estimate), *entry("Job", job_text(estimate.job))], tone_of(estimate))]
    parts += [*_figures(estimate), bullets("Assumed", of_run(estimate))]
    return stacked([*parts, faint(took(estimate.seconds, import_seconds))])


def tone_of(estimate: Estimate) -> str:
    """The colour of the verdict; where nothing bounds the memory there is none."""
    return TONES[estimate.outcome] if estimate.budget.arena.share_bytes is not None else "cyan"


def consists_view(estimate: Estimate) -> RenderableType:
    """The breakdown of the process, with a bar for each share."""
    columns = (
        Column("The process consists of", is_number=False, wide=NAMES),
        Column("MiB"),
        Column("share"),
        Column("", 1, is_number=False),
    )
    rows: list[list[RenderableType]] = [
        [name, f"{rounded:,.1f}", f"{share:.1%}", bar(share, PART_COLOURS[name])]
        for name, rounded, share in shares(breakdown(estimate), DIGITS)
    ]
    return NarrowingTable(columns, rows)


def _figures(estimate: Estimate) -> list[RenderableType]:
    card = memory_table(*card_rows(estimate.budget))
    steps = [faint(line.strip()) for line in step_lines(estimate.run)]
    return [card, memory_table(*memory_rows(estimate)), *steps, consists_view(estimate)]
