"""`planner.check`: compare the jobs of a pyproject.toml with their memory budgets."""

from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

from planner.api.check.against import compare
from planner.api.check.rows import plan_rows
from planner.api.request.options import Options
from planner.errors import ModelError, UsageError
from planner.jobs import allowed_sources, choose, load_catalogue
from planner.planning.check import (
    CheckConfig,
    CheckFailure,
    CheckRow,
    Comparison,
    FailOn,
    Verdict,
    find_config,
    load_config,
    parse_size,
)
from planner.report import Finding, Report, Result, annotations, findings_of, summary, to_sarif

_OF_CHECK = (
    *("models", "allow_code", "isolate", "time_limit", "confidence", "cache", "warn", "on_progress"),
    *("calibrations", "own_calibrations", "no_calibration"),
)
_NO = (Verdict.RISKY, Verdict.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class CheckResult(Result):
    """The verdicts on all jobs of a check on their GPUs. `str` gives the text report."""

    config: CheckConfig
    fail_on: FailOn
    rows: tuple[CheckRow, ...]
    failures: tuple[CheckFailure, ...]
    comparison: Comparison | None  # comparison with another revision, if one was given
    seconds: float

    @property
    def is_yes(self) -> bool:
        """Return whether all jobs were planned with acceptable verdicts, and no process grew too much."""
        has_grown = self.comparison is not None and not self.comparison.is_yes
        return not (self.failures or has_grown or any(self.is_no(row) for row in self.rows))

    def is_no(self, row: CheckRow) -> bool:
        """Return whether the verdict of a row counts as a failure under `fail_on`."""
        return row.judgement.verdict.is_no(self.fail_on)

    def annotations(self, workspace: Path | None = None) -> list[str]:
        """Return a check's findings as GitHub workflow commands, one line each.

        Findings are failures, memory increases, and verdicts other than FITS. Paths are relative to the
        workspace, by default to the folder above the configuration that has .git.
        """
        return list(annotations(self._findings(workspace)))

    def summary(self) -> str:
        """Return a summary of verdicts, failures and memory changes, in Markdown, for a GitHub job."""
        return summary(self.rows, self.failures, self.comparison)

    def to_sarif(self, workspace: Path | None = None) -> dict[str, Any]:
        """Return the findings as a SARIF 2.1.0 log. Paths are as in `annotations`."""
        return to_sarif(self._findings(workspace))

    def _findings(self, workspace: Path | None) -> tuple[Finding, ...]:
        return findings_of(self.config, self.fail_on, self.rows, self.failures, self.comparison, workspace)

    def _report(self) -> Report:
        from planner.report import check_document, check_to_json

        return Report(
            partial(
                check_document,
                self.config,
                self.fail_on,
                self.rows,
                self.failures,
                self.comparison,
                self.seconds,
            ),
            partial(
                check_to_json,
                self.config,
                self.fail_on,
                self.rows,
                self.failures,
                self.comparison,
                self.is_yes,
                self.seconds,
            ),
        )


def check(
    config: str | Path | None = None,
    *,
    fail_on: str | None = None,
    largest_batch: bool | None = None,
    against: str | None = None,
    max_increase: str | None = None,
    **options: Unpack[Options],
) -> CheckResult:
    """Plan the jobs of `[tool.planner]` in a pyproject.toml and return a verdict on each.

    `config` is the file, by default the nearest pyproject.toml with that table, from the current folder
    upwards. Paths in it are relative to its folder. `fail_on` is the mildest verdict that counts as a
    failure: "tight", "risky" (the default) or "out-of-memory". With `largest_batch`, the largest batch on
    each GPU is searched even for jobs that fit. `against` is a revision of the git repository: the jobs are
    also planned with its files, and growth of a process by more than `max_increase` (500MiB, 2%) counts as a
    failure.

    A job that cannot be planned is a failure of the result. Raises the errors of `planner.errors`; wrong
    configuration is a UsageError.
    """
    for name in options:
        if name not in _OF_CHECK:
            raise UsageError(f"{name}: the jobs of the configuration have their own; write it there")
    if max_increase is not None and against is None:
        raise UsageError("--max-increase: it is that since a revision; name one with --against REV")
    most = None if max_increase is None else parse_size(max_increase, "--max-increase: ")
    start = perf_counter()
    read, level = load(config, fail_on, options)
    rows: list[CheckRow] = []
    failures: list[CheckFailure] = []
    with chdir(read.path.parent):
        for job in read.jobs:
            try:
                rows += plan_rows(job, options, lambda verdict: bool(largest_batch) or verdict in _NO)
            except ModelError as error:
                failures.append(CheckFailure(job, str(error)))
    since = None if against is None else compare(read, rows, against, most, options)
    return CheckResult(read, level, tuple(rows), tuple(failures), since, perf_counter() - start)


def load(config: str | Path | None, fail_on: str | None, options: Options) -> tuple[CheckConfig, FailOn]:
    """Return the configuration of a check, and the mildest verdict that counts as a failure.

    The verdict is `fail_on`, else the configuration's, else RISKY. Raises UsageError or DataFileError.
    """
    level = None if fail_on is None else choose(FailOn, fail_on, "--fail-on")
    path = find_config(Path.cwd()) if config is None else Path(config).absolute()
    sources = allowed_sources(options)
    models = options.get("models")
    catalogue = load_catalogue(None if models is None else Path(models), sources)
    with chdir(path.parent if path.parent.is_dir() else "."):
        read = load_config(path, catalogue, sources)
    return read, level or read.fail_on or FailOn.RISKY
