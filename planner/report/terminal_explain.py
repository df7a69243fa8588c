"""`planner explain` and `planner advise` on a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.allocator.history import Difference
from planner.planning import Advice, Estimate, Explanation, Shown, Trial
from planner.report.assumptions import of_run
from planner.report.commands.advise import (
    MICRO_BATCHES,
    NO_SET,
    SETS,
    failed_texts,
    is_split,
    set_text,
    took as tried,
    verdict_lines,
)
from planner.report.commands.explain import (
    block_text,
    fragmentation_rows,
    level_rows,
    peak_text,
    shown_modules,
    tensors_title,
)
from planner.report.commands.explain_diff import difference_lines
from planner.report.commands.explain_workspaces import parts_text, sureness, workspace_text, workspaces_title
from planner.report.commands.max_batch import took, verdict
from planner.report.layout import entry, job_text
from planner.report.plots.colours import CATEGORY_COLOURS
from planner.report.terminal import (
    TONES,
    bar,
    bullets,
    faint,
    headline,
    memory_table,
    mib_text,
    open_table,
    stacked,
)
from planner.report.terminal_plan import consists_view, tone_of
from planner.report.units import mib


def explanation_view(
    estimate: Estimate,
    explanation: Explanation,
    difference: Difference | None,
    shown: Shown,
    import_seconds: float,
) -> RenderableType:
    """The report of `planner explain`."""
    peak = entry("Peak allocated", peak_text(estimate, explanation))
    lines = [*verdict(estimate), *entry("Job", job_text(estimate.job)), *peak]
    compared = None if difference is None else Text("\n".join(difference_lines(difference, shown.top)))
    return stacked(
        [
            headline(lines, tone_of(estimate)),
            consists_view(estimate),
            _modules(explanation, shown.depth),
            _tensors(explanation, shown.top),
            _workspaces(estimate, explanation, shown.top),
            memory_table(*fragmentation_rows(explanation.fragmentation)),
            _levels(explanation),
            compared,
            bullets("Assumed", of_run(estimate)),
            faint(took(estimate.seconds, import_seconds)),
        ]
    )


def _modules(explanation: Explanation, depth: int | None) -> Table | None:
    rows, total = shown_modules(explanation, depth), explanation.run.peak_allocated_bytes
    if not rows:
        return None
    table = open_table("By module at the peak", "MiB>", "share>", "mostly", "")
    for row in rows:
        share = row.size_bytes / total
        colour = CATEGORY_COLOURS[row.role] if row.role is not None else "default"
        name = Text(f"{'  ' * row.level}{row.name}", style="" if row.level else "bold")
        table.add_row(
            name, mib_text(row.size_bytes), f"{share:.1%}", Text(row.mostly, style="dim"), bar(share, colour)
        )
    return table


def _tensors(explanation: Explanation, top: int) -> Table:
    table = open_table("MiB", "", tensors_title(explanation))
    table.columns[0].justify = "right"
    for block in explanation.blocks[:top]:
        said = Text(block_text(block))
        if block.detail is not None and block.detail.source:
            said.append(f"\n{block.detail.source}  ", style="cyan").append(block.detail.code, style="dim")
        role = Text("▌ ", CATEGORY_COLOURS[block.role]).append(str(block.role), style="default")
        table.add_row(mib_text(block.size_bytes), role, said)
    return table


def _workspaces(estimate: Estimate, explanation: Explanation, top: int) -> RenderableType | None:
    if not explanation.workspaces:
        return None
    table = open_table("MiB", workspaces_title(explanation))
    table.columns[0].justify = "right"
    for one in explanation.workspaces[:top]:
        table.add_row(
            mib_text(one.size_bytes), Text(workspace_text(one)).append(f"\n{parts_text(one)}", style="dim")
        )
    return Group(table, faint(sureness(estimate, explanation)))


def _levels(explanation: Explanation) -> Table:
    table = open_table("Highest levels", "allocated>", "reserved>", "at the end>")
    for name, levels in level_rows(explanation):
        table.add_row(name, *map(mib_text, levels))
    return table


# ---- advice


def advice_view(advice: Advice, import_seconds: float) -> RenderableType:
    """The report of `planner advise`."""
    tone = TONES[advice.unchanged.estimate.outcome]
    lines = [*verdict_lines(advice), *entry("Job", job_text(advice.unchanged.recipe.job))]
    return stacked(
        [
            headline(lines, tone),
            None if advice.unchanged.fits else _sets(advice.sets),
            _singles(advice),
            bullets("", failed_texts(advice)) if advice.failed else None,
            faint(MICRO_BATCHES) if is_split(advice) else None,
            faint(tried(advice, import_seconds)),
        ]
    )


def _sets(sets: tuple[Trial, ...]) -> RenderableType:
    if not sets:
        return Text(NO_SET, style="red")
    table = Table.grid(padding=(0, 2))
    for number, trial in enumerate(sets, 1):
        table.add_row(f"{number}.", Text(set_text(trial), style="bold green"), "")
        for change in trial.changes:
            table.add_row("", change.name, Text(change.cost, style="dim"))
    return Group(Text(SETS, style="bold"), table)


def _singles(advice: Advice) -> Table:
    table = open_table("Each change by itself", "needs MiB>", "saves>", "")
    for trial in advice.singles:
        saved = advice.unchanged.needed_bytes - trial.needed_bytes
        fits = "fits" if trial.fits and not advice.unchanged.fits else ""
        sizes = (f"{mib(size, 0):,.0f}" for size in (trial.needed_bytes, saved))
        table.add_row(trial.changes[0].name, *sizes, Text(fits, style="green"))
    return table
