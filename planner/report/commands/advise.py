"""The report of `planner advise`."""

from collections.abc import Iterable
from typing import Any

from planner.planning import Advice, Attempt, Change
from planner.report.budget import job_to_report
from planner.report.commands.estimates.estimate import estimate_to_json
from planner.report.commands.estimates.verdict import batch_answer, style_of
from planner.report.describe import job_entry
from planner.report.document import Block, Bullets, Cell, Column, Document, Headline, Paragraph, Table
from planner.report.units import attributes, mib, mib_text, timing_line

_NAME_WIDTH = 48  # width of the column of options


def advice_document(advice: Advice, import_seconds: float) -> Document:
    """Return the report of `planner advise`."""
    unchanged = advice.unchanged
    failed = refusals(advice.failed)
    is_split = any("accumulate" in change.name for attempt in advice.sets for change in attempt.changes)
    split = "--batch with --accumulate is that of one micro-batch; the optimizer still sees all."
    return Document.of(
        [Headline((*_verdict(advice), job_entry(unchanged.training.job)), style_of(unchanged.estimate))],
        [] if unchanged.fits else _sets(advice),
        [_single_changes(advice), *([Bullets("", failed)] if failed else [])],
        [Paragraph(split, "faint")] if is_split else [],
        [timing_line(importing=import_seconds, trying=advice.seconds)],
    )


def refusals(failed: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return one line for each reason, with all changes that fail for that reason.

    `failed` has pairs (change, reason).

    >>> refusals([("--a", "no blocks"), ("--b 1", "no GPU"), ("--c", "no blocks")])
    ('--a and --c are out of the question: no blocks', '--b 1 is out of the question: no GPU')
    """
    names: dict[str, list[str]] = {}
    for name, reason in failed:
        names.setdefault(reason, []).append(name)
    return tuple(
        f"{', '.join(some[:-1])}{' and ' if some[:-1] else ''}{some[-1]} "
        f"{'are' if some[:-1] else 'is'} out of the question: {reason}"
        for reason, some in names.items()
    )


def _verdict(advice: Advice) -> list[str]:
    """Return lines that say whether the unchanged batch fits and, if not, how much memory is missing."""
    attempt, sure = advice.unchanged, f"at confidence {advice.unchanged.estimate.budget.confidence:g}"
    if attempt.fits:
        how = ", though with allocator retries, which take time" if _retries(attempt) else ""
        return [
            f"Batch {attempt.training.batch} fits {sure} as it is{how}; what each change would save is below"
        ]
    needed, has = mib(attempt.needed_bytes, 0), mib(advice.available_bytes or 0, 0)
    memory = f"the allocator needs {needed:,.0f} MiB and gets {has:,.0f} MiB {sure}"
    return [f"{batch_answer(attempt.estimate)}: {memory}", f"{needed - has:,.0f} MiB have to go"]


def _sets(advice: Advice) -> list[Block]:
    """Return a heading and a table of the sets of changes that make the batch fit, or a text if none does."""
    if not advice.sets:
        none = "No set of up to three changes makes it fit; take a smaller batch or a larger GPU"
        return [Paragraph(none, "bad")]
    title = "Any one of these makes it fit, the mildest first; each was traced and replayed"
    rows: list[tuple[Cell | str, ...]] = []
    for number, attempt in enumerate(advice.sets, 1):
        process = f"{mib_text(attempt.estimate.process_bytes, 0)} MiB for the process"
        remark = "releasing cached memory on the way" if _retries(attempt) else ""
        rows.append((f"{number}.", Cell(process, "good"), remark))
        rows += [("", change.name, Cell(change.cost, "faint")) for change in attempt.changes]
    columns = (Column(), Column(min_width=_NAME_WIDTH - 6), Column())
    return [Paragraph(title, "strong"), Table(columns, rows)]


def _single_changes(advice: Advice) -> Table:
    columns = (
        Column("Each change by itself", min_width=_NAME_WIDTH),
        Column("needs MiB", is_number=True),
        Column("saves", is_number=True),
        Column(),
    )
    unchanged = advice.unchanged
    rows = [
        (
            attempt.changes[0].name,
            mib_text(attempt.needed_bytes, 0),
            mib_text(unchanged.needed_bytes - attempt.needed_bytes, 0),
            Cell("fits" if attempt.fits and not unchanged.fits else "", "good"),
        )
        for attempt in advice.singles
    ]
    return Table(columns, rows)


def _retries(attempt: Attempt) -> bool:
    return bool(attempt.estimate.retry_costs)


def advice_to_json(advice: Advice, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner advise`. `needed_mib` is the least memory the allocator needs."""
    unchanged = advice.unchanged

    def needed(attempt: Attempt) -> dict[str, Any]:
        saved_bytes = unchanged.needed_bytes - attempt.needed_bytes
        return {**attributes(attempt, "needed_mib"), "saved_mib": mib(saved_bytes)}

    def in_words(change: Change) -> dict[str, str]:
        return {"option": change.name, "cost": change.cost}

    return {
        **job_to_report(unchanged.training.job, unchanged.estimate.budget),
        "batch": unchanged.training.batch,
        "fits": unchanged.estimate.outcome.value,
        **attributes(unchanged, "needed_mib"),
        **attributes(advice, "available_mib"),
        "sets": [
            {
                "changes": [in_words(change) for change in attempt.changes],
                **needed(attempt),
                "estimate": estimate_to_json(attempt.estimate, import_seconds),
            }
            for attempt in advice.sets
        ],
        "single_changes": [
            {**in_words(attempt.changes[0]), **needed(attempt), "fits": attempt.estimate.outcome.value}
            for attempt in advice.singles
        ],
        "failed": [{"option": name, "reason": reason} for name, reason in advice.failed],
        "seconds": {"import": round(import_seconds, 3), "try": round(advice.seconds, 3)},
    }
