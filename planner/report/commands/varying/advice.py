"""The report of `planner advise` on samples of varying sizes."""

from typing import Any

from planner.planning import RunRisk, VaryingAdvice, VaryingAttempt
from planner.report.budget import job_to_report
from planner.report.commands.advise import refusals
from planner.report.commands.varying.plan import largest_text, risk_text, risk_to_json, unit_of
from planner.report.describe import job_entry
from planner.report.document import Block, Bullets, Cell, Column, Document, Headline, Paragraph, Table
from planner.report.units import attributes, timing_line

_NAME_WIDTH = 48  # width of the column of options


def varying_advice_document(advice: VaryingAdvice, import_seconds: float) -> Document:
    """Return the report of `planner advise` on samples of varying sizes."""
    unchanged = advice.unchanged
    failed = refusals(advice.failed)
    how = (
        "each change was traced and played on sampled batches; P(out of memory) is that of a run of "
        f"{unchanged.training.job.samples.run_steps:,} steps"
    )
    costs = tuple(f"{one.changes[0].name}: {one.changes[0].cost}" for one in advice.singles)
    return Document.of(
        [Headline((*_verdict(advice), job_entry(unchanged.training.job)), _style(advice))],
        [_table(advice), *([Bullets("", failed)] if failed else [])],
        _together(advice),
        [Bullets("What each costs", costs)] if costs else [],
        [Paragraph(how, "faint")],
        [timing_line(importing=import_seconds, trying=advice.seconds)],
    )


def _style(advice: VaryingAdvice) -> Any:
    is_good = advice.unchanged.fits if advice.batch else bool(advice.unchanged.side.largest)
    return "good" if is_good else "bad"


def _verdict(advice: VaryingAdvice) -> list[str]:
    """Return lines that say whether the batch fits unchanged, and the unchanged recipe's largest batch."""
    attempt = advice.unchanged
    unit = unit_of(attempt.training.job)
    largest = f"the largest batch is {largest_text(attempt.side, unit)}"
    if advice.batch is None or attempt.asked is None:
        return [f"As it is, {largest}"]
    does = "fits as it is" if attempt.fits else "does not fit"
    risk = risk_text(attempt.asked)
    return [f"Batch {advice.batch:,}{unit} {does}: P(out of memory) {risk}; {largest}"]


def _table(advice: VaryingAdvice) -> Table:
    """Return a table of the largest batch and the risk under each single change.

    The first row is the unchanged recipe.
    """
    columns = [
        Column("Each change by itself", min_width=_NAME_WIDTH),
        Column(f"largest{unit_of(advice.unchanged.training.job)}", is_number=True),
        Column("gained", is_number=True),
    ]
    if advice.batch is not None:
        columns += [Column(f"P(out of memory) at {advice.batch:,}", is_number=True), Column()]
    attempts = (advice.unchanged, *advice.singles)
    return Table(columns, [_row(advice, attempt) for attempt in attempts])


def _row(advice: VaryingAdvice, attempt: VaryingAttempt) -> tuple[Cell | str, ...]:
    name = attempt.changes[0].name if attempt.changes else "(none)"
    gained = attempt.side.largest - advice.unchanged.side.largest
    cells: tuple[Cell | str, ...] = (
        name, f"{attempt.side.largest:,}", f"{gained:+,}" if attempt.changes else ""
    )  # fmt: skip
    if attempt.asked is None:
        return cells
    return *cells, risk_text(attempt.asked), Cell("fits" if attempt.fits else "", "good")


def _together(advice: VaryingAdvice) -> list[Block]:
    """Return a paragraph on whether a set of changes makes the batch fit, or [] if no set is needed.

    Returns [] if no batch was given, or if it fits unchanged or with a single change.
    """
    if advice.batch is None or any(one.fits for one in (advice.unchanged, *advice.singles)):
        return []
    found = advice.together
    if found is None or found.asked is None:
        return [
            Paragraph("No set of these changes was found with which it fits; take a smaller batch", "bad")
        ]
    names = " ".join(change.name for change in found.changes)
    return [Paragraph(f"Together they fit: {names}, with P(out of memory) {risk_text(found.asked)}", "good")]


def varying_advice_to_json(advice: VaryingAdvice, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner advise` on samples of varying sizes."""
    unchanged = advice.unchanged

    def to_json(attempt: VaryingAttempt) -> dict[str, Any]:
        return {
            "changes": [{"option": change.name, "cost": change.cost} for change in attempt.changes],
            "batch": attempt.training.batch if advice.batch else None,
            "fits": attempt.fits if advice.batch else None,
            "asked": _risk(attempt.asked),
            "largest_batch": attempt.side.largest,
            "at_largest": _risk(attempt.side.at),
        }

    return {
        **job_to_report(unchanged.training.job, unchanged.side.budget),
        **attributes(advice, "batch"),
        "unchanged": to_json(unchanged),
        "single_changes": [to_json(attempt) for attempt in advice.singles],
        "together": None if advice.together is None else to_json(advice.together),
        "failed": [{"option": name, "reason": reason} for name, reason in advice.failed],
        "seconds": {"import": round(import_seconds, 3), "try": round(advice.seconds, 3)},
    }


def _risk(risk: RunRisk | None) -> dict[str, Any] | None:
    """Return the JSON object of a risk without its key `runs`, or None if `risk` is None."""
    whole = risk_to_json(risk)
    return whole and {name: value for name, value in whole.items() if name != "runs"}
