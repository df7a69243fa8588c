"""The report of `planner check`."""

from collections.abc import Iterator, Sequence
from typing import Any

from planner.planning.check import (
    CheckChange,
    CheckConfig,
    CheckFailure,
    CheckRow,
    Comparison,
    FailOn,
    ModuleChange,
    Verdict,
)
from planner.report.document import (
    Block,
    Bullets,
    Cell,
    Column,
    Document,
    Entry,
    Headline,
    Paragraph,
    Style,
    Table,
)
from planner.report.units import SCHEMA, attributes, batch_text, mib, mib_text, probability_text

STYLES: dict[Verdict, Style] = {
    Verdict.FITS: "good",
    Verdict.TIGHT: "warning",
    Verdict.RISKY: "warning",
    Verdict.OUT_OF_MEMORY: "bad",
}


def check_document(
    config: CheckConfig,
    fail_on: FailOn,
    rows: Sequence[CheckRow],
    failures: Sequence[CheckFailure],
    comparison: Comparison | None,
    seconds: float,
) -> Document:
    """Return the report of `planner check`: verdicts, failures, and changes since a revision."""
    reasons = [f"{subject(row)}: {row.judgement.reason}" for row in rows if row.judgement.reason]
    failed = [Entry("Not planned", f"{failure.job.name}: {failure.why}") for failure in failures]
    return Document.of(
        [_headline(config, fail_on, rows, failures)],
        [_table(rows)] if rows else [],
        [*failed, *([Bullets("Why", reasons)] if reasons else [])],
        [] if comparison is None else list(_comparison(comparison)),
        [Bullets("Assumed", tuple(dict.fromkeys(note for row in rows for note in row.estimate.notes)))],
        [Paragraph(f"Took {seconds:.1f} s", "faint")],
    )


def _headline(
    config: CheckConfig, fail_on: FailOn, rows: Sequence[CheckRow], failures: Sequence[CheckFailure]
) -> Headline:
    refused = sum(row.judgement.verdict.is_no(fail_on) for row in rows)
    verdicts = [row.judgement.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in Verdict if one in verdicts)
    parts = [*filter(None, [counts]), *([f"{len(failures)} not planned"] if failures else [])]
    style: Style = "bad" if refused or failures else "good"
    return Headline((f"{config.path.name}: {', '.join(parts)}", Entry("Fails on", fail_on.value)), style)


def _table(rows: Sequence[CheckRow]) -> Table:
    searched = any(row.largest_batch is not None for row in rows)
    columns = (
        Column("Job"),
        Column("Batch", is_number=True),
        Column("GPU"),
        Column("Verdict"),
        Column("MiB", is_number=True),
        Column("at most", is_number=True),
        Column("of", is_number=True),
        Column("P(OOM)", is_number=True, name="probability of running out of memory"),
        *([Column("largest", is_number=True, name="largest batch")] if searched else []),
    )
    return Table(columns, tuple(_cells(row, searched) for row in rows), indent=0)


def _cells(row: CheckRow, searched: bool) -> tuple[Cell | str, ...]:
    job, batch, place, verdict, *sizes, largest = texts_of_row(row)
    styled = Cell(verdict, STYLES[row.judgement.verdict])
    return (job, batch, place, styled, *sizes, *([largest] if searched else []))


def texts_of_row(row: CheckRow) -> list[str]:
    """Return a verdict's table row as texts: job, batch, GPU, verdict, sizes, probability, largest batch."""
    available, chance = row.judgement.available_bytes, row.judgement.p_out_of_memory
    return [
        row.job.name,
        f"{row.job.batch:,}",
        row.place,
        row.judgement.verdict,
        mib_text(row.estimate.process_bytes),
        mib_text(row.estimate.process_upper_bytes),
        "" if available is None else mib_text(available),
        "" if chance is None else probability_text(chance),
        "" if row.largest_batch is None else batch_text(row.largest_batch),
    ]


def _comparison(comparison: Comparison) -> Iterator[Block]:
    columns = (
        Column("Job"),
        Column("Batch", is_number=True),
        Column("GPU"),
        Column("MiB then", is_number=True),
        Column("MiB now", is_number=True),
        Column("change", is_number=True),
        Column("in module"),
    )
    yield Paragraph(f"Since {comparison.revision} ({comparison.commit})", "strong")
    if comparison.changes:
        rows = tuple(_change_cells(change, comparison) for change in comparison.changes)
        yield Table(columns, rows, indent=0)
    for name, why in comparison.missing:
        yield Paragraph(f"{name} was not planned then: {why}")


def _change_cells(change: CheckChange, comparison: Comparison) -> tuple[Cell | str, ...]:
    *others, size, module = texts_of_change(change)
    return (*others, Cell(size, "bad" if change.exceeds(comparison.max_increase) else ""), module)


def texts_of_change(change: CheckChange) -> list[str]:
    """Return a change's table row as texts: job, batch, GPU, sizes then and now, change, and module."""
    row = change.row
    return [
        row.job.name,
        f"{row.job.batch:,}",
        row.place,
        mib_text(change.before_bytes),
        mib_text(row.estimate.process_bytes),
        change_text(change.change_bytes),
        module_text(change),
    ]


def change_text(change_bytes: int) -> str:
    """Return a change in bytes as signed text in MiB or GiB, or "none" if 0.

    >>> change_text(1288490189), change_text(-5 * 2**20), change_text(0)
    ('+1.2 GiB', '-5.0 MiB', 'none')
    """
    if not change_bytes:
        return "none"
    unit, size = ("GiB", 2**30) if abs(change_bytes) >= 2**30 else ("MiB", 2**20)
    return f"{change_bytes / size:+,.1f} {unit}"


def module_text(change: CheckChange) -> str:
    """Return the module that changes most and its change, such as `fc (+1.2 GiB)`, or "" if unknown."""
    module = change.module
    if module is None:
        return ""
    return f"{module.name or 'outside of modules'} ({change_text(module.change_bytes)})"


def place_text(change: CheckChange) -> str:
    """Return text such as `in module fc (+1.2 GiB)` on the module that changes most, or "" if unknown."""
    is_in_module = change.module is not None and change.module.name
    return f"{'in module ' if is_in_module else ''}{module_text(change)}"


def subject(row: CheckRow) -> str:
    """Return the job, batch and GPU of a verdict as text, such as `finetune at batch 64 on RTX 4090`."""
    return f"{row.job.name} at batch {row.job.batch:,} on {row.place}"


def check_to_json(
    config: CheckConfig,
    fail_on: FailOn,
    rows: Sequence[CheckRow],
    failures: Sequence[CheckFailure],
    comparison: Comparison | None,
    is_yes: bool,
    seconds: float,
) -> dict[str, Any]:
    """Return the JSON object of `planner check`."""
    return {
        "schema": SCHEMA,
        "config": str(config.path),
        "fail_on": fail_on.value,
        "ok": is_yes,
        "rows": [_row(row) for row in rows],
        "failures": [{"job": one.job.name, "line": one.job.line, "why": one.why} for one in failures],
        "against": None if comparison is None else _comparison_to_json(comparison),
        "seconds": round(seconds, 3),
    }


def _comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    return {
        **attributes(comparison, "revision", "commit"),
        "changes": [_change_to_json(change, comparison) for change in comparison.changes],
        "missing": [{"job": name, "why": why} for name, why in comparison.missing],
    }


def _change_to_json(change: CheckChange, comparison: Comparison) -> dict[str, Any]:
    row = change.row
    return {
        "job": row.job.name,
        "batch": row.job.batch,
        "gpu": None if row.device is None else row.device.name,
        "process_mib": mib(row.estimate.process_bytes),
        "process_mib_then": mib(change.before_bytes),
        "change_mib": mib(change.change_bytes),
        "exceeds": change.exceeds(comparison.max_increase),
        "module": None if change.module is None else _module_to_json(change.module),
        "modules": [_module_to_json(module) for module in change.modules],
    }


def _module_to_json(module: ModuleChange) -> dict[str, Any]:
    return {"name": module.name, "change_bytes": module.change_bytes}


def _row(row: CheckRow) -> dict[str, Any]:
    estimate, budget_bytes = row.estimate, row.job.budget_bytes
    return {
        "job": row.job.name,
        "line": row.job.line,
        "model": row.job.job.model.name,
        "batch": row.job.batch,
        "gpu": None if row.device is None else row.device.name,
        "verdict": row.judgement.verdict.value,
        "reason": row.judgement.reason,
        "fits": estimate.outcome.value,
        "confidence": estimate.budget.confidence,
        **attributes(estimate, "process_mib", "process_upper_mib"),
        **attributes(row.judgement, "available_mib"),
        "budget_mib": None if budget_bytes is None else mib(budget_bytes),
        "p_out_of_memory": row.judgement.p_out_of_memory,
        "largest_batch": row.largest_batch,
    }
