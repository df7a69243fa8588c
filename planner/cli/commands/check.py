"""The command `planner check`."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from planner._support.atomic_write import save
from planner._support.bounded_read import MIB, read_bytes
from planner.cli.options import (
    CALIBRATIONS,
    AllowCode,
    Answer,
    Catalogue,
    Confidence,
    Isolate,
    TimeLimit,
    flag,
    option,
    with_options,
)
from planner.errors import ModelError, UnsavedError, unsaved
from planner.program import OnProgress

if TYPE_CHECKING:
    from planner import CheckResult

_SHARED = {
    "models": Catalogue,
    "allow_code": AllowCode,
    "isolate": Isolate,
    "time_limit": TimeLimit,
    "confidence": Confidence,
    "no_cache": Annotated[bool | None, flag("--no-cache", "Neither read nor write cached traces.")],
    **CALIBRATIONS,
}


@with_options(_SHARED)
def check_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    config: Annotated[
        str | None, option("FILE", "The configuration; by default the nearest pyproject.toml that has it.")
    ],
    fail_on: Annotated[
        str | None,
        option("VERDICT", "The first verdict that is a no: tight, risky (the default) or out-of-memory."),
    ],
    largest_batch: Annotated[
        bool | None, flag("--largest-batch", "Search the largest batch also of jobs that fit.")
    ],
    against: Annotated[
        str | None, option("REV", "Compare with the files of a git revision, such as origin/main.")
    ],
    max_increase: Annotated[
        str | None,
        option("SIZE", "With --against: the most by which a process may grow, such as 500MiB or 2%."),
    ],
    sarif: Annotated[Path | None, option("FILE", "Also write the findings as SARIF 2.1.0.")],
    annotations: Annotated[
        bool | None,
        flag("--annotations", "Print GitHub's annotations on standard error; by default in its Actions."),
    ],
    summary: Annotated[
        Path | None,
        option("FILE", "Also write a summary in Markdown; by default that of a job in GitHub's Actions."),
    ],
) -> Answer:
    """Check the jobs of [tool.planner] in pyproject.toml against their budgets."""
    from planner import check

    options["on_progress"] = on_progress
    result = check(
        config,
        fail_on=fail_on,
        largest_batch=largest_batch,
        against=against,
        max_increase=max_increase,
        **options,
    )
    root = os.environ.get("GITHUB_WORKSPACE")
    workspace = Path(root) if root else None
    with unsaved(result):
        if sarif is not None:
            save(sarif, (json.dumps(result.to_sarif(workspace), indent=2) + "\n").encode(), "the findings")
        _save_summary(result, summary)
    if annotations or _is_in_actions():
        for line in result.annotations(workspace):
            print(line, file=sys.stderr)
    if result.failures:
        first, count = result.failures[0], len(result.failures)
        more = f"; {count - 1} more not planned" if count > 1 else ""
        error = ModelError(f"job {first.job.name} cannot be planned: {first.why}{more}")
        raise UnsavedError(error, result)
    return result, result.is_yes


def _is_in_actions() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _save_summary(result: "CheckResult", path: Path | None) -> None:
    """Write the summary to `path`, or append it to GitHub's summary if `path` is None.

    Without `path` and outside of GitHub's Actions, do nothing.
    """
    if path is not None:
        save(path, result.summary().encode(), "the summary")
        return
    of_job = os.environ.get("GITHUB_STEP_SUMMARY")
    if of_job and _is_in_actions():
        before = read_bytes(Path(of_job), 64 * MIB) if Path(of_job).is_file() else b""
        save(Path(of_job), before + result.summary().encode(), "the summary of the job")
