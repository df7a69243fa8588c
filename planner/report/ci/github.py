"""Report the result of `planner check` in GitHub Actions.

The report is annotations for the runner, and the summary of a job in Markdown. The runner reads workflow
commands from standard error as well as from standard output.
"""

from collections.abc import Iterable, Iterator, Sequence

from planner.planning.check import CheckChange, CheckFailure, CheckRow, Comparison, Verdict
from planner.report.ci.findings import Finding
from planner.report.commands.check import change_text, module_text
from planner.report.units import batch_text, mib_text, probability_text

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_MARKS = {
    Verdict.FITS: "✅",
    Verdict.TIGHT: "🟡",
    Verdict.RISKY: "🟠",
    Verdict.OUT_OF_MEMORY: "❌",
}


def annotations(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield an annotation for each finding, such as `::error file=pyproject.toml,line=7,title=...::...`."""
    for finding in findings:
        properties = {"file": finding.path, "line": str(finding.line), "title": f"planner: {finding.title}"}
        listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        yield f"::{_COMMANDS[finding.level]} {listed}::{_data(finding.message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def summary(
    rows: Sequence[CheckRow], failures: Sequence[CheckFailure], comparison: Comparison | None = None
) -> str:
    """Return a check's table of verdicts, its failures, and the comparison if there is one, in Markdown."""
    lines = ["### GPU memory: `planner check`", ""]
    if rows:
        lines += [
            "| job | batch | GPU | verdict | MiB | at most | of | P(out of memory) | largest batch |",
            "|---|--:|---|---|--:|--:|--:|--:|--:|",
            *(_line(row) for row in rows),
            "",
        ]
        level = " and ".join(sorted({f"{row.estimate.budget.confidence:g}" for row in rows}))
        lines += [f"Computed before any run, nothing is measured. At most: at confidence {level}.", ""]
    lines += [f"- **{_cell(one.job.name)}** was not planned: {_cell(one.why)}" for one in failures]
    if comparison is not None:
        lines += ["", *_comparison(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield f"#### Since {_cell(comparison.revision)} ({comparison.commit})"
    yield ""
    if comparison.changes:
        yield "| job | batch | GPU | MiB then | MiB now | change | in module |"
        yield "|---|--:|---|--:|--:|--:|---|"
        yield from (_change(change, comparison) for change in comparison.changes)
        yield ""
    yield from (f"- **{_cell(name)}** was not planned then: {_cell(why)}" for name, why in comparison.missing)


def _change(change: CheckChange, comparison: Comparison) -> str:
    row, mark = change.row, "❌ " if change.exceeds(comparison.max_increase) else ""
    cells = (
        _cell(row.job.name),
        f"{row.job.batch:,}",
        _cell(row.place),
        mib_text(change.before_bytes),
        mib_text(row.estimate.process_bytes),
        f"{mark}{change_text(change.change_bytes)}",
        _cell(module_text(change)),
    )
    return f"| {' | '.join(cells)} |"


def _line(row: CheckRow) -> str:
    verdict, judgement = row.judgement.verdict, row.judgement
    available, chance, largest = judgement.available_bytes, judgement.p_out_of_memory, row.largest_batch
    cells = (
        _cell(row.job.name),
        f"{row.job.batch:,}",
        _cell(row.place),
        f"{_MARKS[verdict]} {verdict}",
        mib_text(row.estimate.process_bytes),
        mib_text(row.estimate.process_upper_bytes),
        "" if available is None else mib_text(available),
        "" if chance is None else probability_text(chance),
        "" if largest is None else batch_text(largest),
    )
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Return a text escaped for a cell of a Markdown table."""
    for mark in "\\`*_<>|[]":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
