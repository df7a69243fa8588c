"""Turn the result of `planner check` into findings at lines of the configuration, for a pull request."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from planner.planning.check import (
    SMALLEST_BYTES,
    CheckConfig,
    CheckFailure,
    CheckRow,
    Comparison,
    FailOn,
    Verdict,
)
from planner.report.commands.check import change_text, place_text, subject
from planner.report.units import batch_text, mib_text, probability_text

Level = Literal["error", "warning", "note"]


class Finding(Struct, frozen=True):
    """A problem that `planner check` found, to be shown in a pull request."""

    rule: str  # an identifier such as out-of-memory
    level: Level
    title: str
    message: str  # one line
    path: str  # path of the configuration in the repository, with slashes
    line: int
    key: str  # identifies the same finding in every run


def findings_of(
    config: CheckConfig,
    fail_on: FailOn,
    rows: Sequence[CheckRow],
    failures: Sequence[CheckFailure],
    comparison: Comparison | None = None,
    workspace: Path | None = None,
) -> tuple[Finding, ...]:
    """Return a finding for each verdict other than FITS, each failure and each large increase of memory.

    A failure is a job that was not planned. Increases below `SMALLEST_BYTES` are left out. `workspace` is the
    root of the repository, if known.
    """
    path = path_in_repository(config.path, workspace)
    grown = () if comparison is None else _grown(path, comparison)
    return (*_verdicts(path, fail_on, rows), *_failures(path, failures), *grown)


def _verdicts(path: str, fail_on: FailOn, rows: Sequence[CheckRow]) -> Iterator[Finding]:
    for row in rows:
        verdict = row.judgement.verdict
        if verdict is Verdict.FITS:
            continue
        mild: Level = "note" if verdict is Verdict.TIGHT else "warning"
        level: Level = "error" if verdict.is_no(fail_on) else mild
        rule = verdict.value.lower().replace(" ", "-")
        title = f"{row.job.name}: {verdict}"
        key = f"{row.job.name}/{row.place}"
        yield Finding(rule, level, title, _message(row), path, row.job.line, key)


def _message(row: CheckRow) -> str:
    estimate, judgement = row.estimate, row.judgement
    parts = [
        f"{subject(row)}: {judgement.verdict}, {judgement.reason}",
        f"the process takes {mib_text(estimate.process_bytes)} MiB, at most "
        f"{mib_text(estimate.process_upper_bytes)} MiB at confidence {estimate.budget.confidence:g}"
        + ("" if judgement.available_bytes is None else f", of {mib_text(judgement.available_bytes)} MiB"),
    ]
    if judgement.p_out_of_memory is not None:
        parts.append(f"P(out of memory) {probability_text(judgement.p_out_of_memory)}")
    if row.largest_batch is not None:
        parts.append(f"largest batch {batch_text(row.largest_batch)}")
    return "; ".join(parts)


def _failures(path: str, failures: Sequence[CheckFailure]) -> Iterator[Finding]:
    for failure in failures:
        job = failure.job
        title = f"{job.name}: not planned"
        yield Finding("not-planned", "error", title, f"{job.name}: {failure.why}", path, job.line, job.name)


def _grown(path: str, comparison: Comparison) -> Iterator[Finding]:
    for change in comparison.changes:
        if change.change_bytes < SMALLEST_BYTES:
            continue
        allowed: Level = "warning" if comparison.max_increase is None else "note"
        level: Level = "error" if change.exceeds(comparison.max_increase) else allowed
        job, grown = change.row.job, change_text(change.change_bytes)
        module = f", {place_text(change)}" if change.module is not None else ""
        message = (
            f"{job.name}: {grown} at batch {job.batch:,} since {comparison.revision} on {change.row.place}"
            f"{module}; the process takes {mib_text(change.row.estimate.process_bytes)} MiB"
        )
        title, key = f"{job.name}: {grown}", f"{job.name}/{change.row.place}/growth"
        yield Finding("memory-regression", level, title, message, path, job.line, key)


def path_in_repository(path: Path, workspace: Path | None) -> str:
    """Return a path relative to the root of its repository, or only its name if it is in none.

    The root is `workspace` or, if the path is outside of it, the nearest parent folder with .git.
    """
    roots = [] if workspace is None else [workspace]
    roots += [folder for folder in path.parents if (folder / ".git").exists()]
    for root in roots:
        for one, other in ((path, root), (path.resolve(), root.resolve())):
            if one.is_relative_to(other):
                return one.relative_to(other).as_posix()
    return path.name
