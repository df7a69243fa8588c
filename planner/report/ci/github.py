"""Report the result of `planner check` in GitHub Actions.

The report is annotations for the runner, and the summary of a job in Markdown. The runner reads workflow
commands from standard error as well as from standard output.
"""

from collections.abc import Iterable, Iterator, Sequence

from planner.planning.check import CheckChange, CheckFailure, CheckRow, Comparison, Verdict
from planner.report.ci.findings import Finding
from planner.report.commands.check import texts_of_change, texts_of_row

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
            *map(_verdict, rows),
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
    *others, size, module = texts_of_change(change)
    mark = "❌ " if change.exceeds(comparison.max_increase) else ""
    return _line([*others, f"{mark}{size}", module])


def _verdict(row: CheckRow) -> str:
    job, batch, place, verdict, *others = texts_of_row(row)
    return _line([job, batch, place, f"{_MARKS[row.judgement.verdict]} {verdict}", *others])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Return a text escaped for a cell of a Markdown table."""
    for mark in "\\`*_<>|[]":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
