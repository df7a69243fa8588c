"""A check as text, JSON, annotations, Markdown and SARIF."""

import json
from pathlib import Path

import pytest

from planner.api.check.check import CheckResult
from planner.planning.check import (
    CheckChange,
    CheckConfig,
    CheckFailure,
    CheckJob,
    CheckRow,
    Comparison,
    FailOn,
    Headroom,
    Judgement,
    ModuleChange,
    Verdict,
)
from planner.planning.estimate import Estimate
from planner.report.ci.findings import path_in_repository
from tests.helpers.golden import expected
from tests.report.test_text import CARD, JOB, budget, estimated

MIB = 2**20


def estimate() -> Estimate:
    return estimated(8, budget(800))


def made_up(folder: Path) -> CheckResult:
    """One job of each verdict, and one that was not planned."""
    path = folder / "sub" / "pyproject.toml"
    rows = []
    for line, verdict in enumerate(Verdict, 10):
        job = CheckJob(verdict.name.lower(), "", line, JOB, 8, (CARD,), None, None, Headroom())
        reason = "" if verdict is Verdict.FITS else f"the reason of {verdict}"
        judgement = Judgement(verdict, reason, 800 * MIB, 0.25)
        largest = 4 if verdict is Verdict.OUT_OF_MEMORY else None
        rows.append(CheckRow(job, CARD, estimate(), judgement, largest))
    broken = CheckJob("a|b", "", 20, JOB, 8, (None,), 2**30, None, Headroom())
    failures = (CheckFailure(broken, "cannot be built: 100 % wrong"),)
    config = CheckConfig(path, None, tuple(row.job for row in rows))
    body = ModuleChange("body.0", 64 * MIB)
    changes = (
        CheckChange(rows[0], rows[0].estimate.process_bytes - 100 * MIB, body, (body,)),
        CheckChange(rows[1], rows[1].estimate.process_bytes - 2 * MIB, ModuleChange("", MIB), ()),
        CheckChange(rows[2], rows[2].estimate.process_bytes, None, ()),
    )
    since = Comparison("main", "abc1234", Headroom(50 * MIB), changes, (("new", "not there"),))
    return CheckResult(config, FailOn.RISKY, tuple(rows), failures, since, 1.25)


@pytest.fixture
def result(tmp_path: Path) -> CheckResult:
    (tmp_path / ".git").mkdir()
    return made_up(tmp_path)


FORMS = {
    "check.txt": str,
    "annotations.txt": lambda result: "\n".join(result.annotations()),
    "summary.md": lambda result: result.summary().rstrip("\n"),
    "findings.sarif": lambda result: json.dumps(result.to_sarif(), indent=1),
    "check.json": lambda result: json.dumps(result.to_dict() | {"config": ""}, indent=1),
}


@pytest.mark.parametrize("name", FORMS)
def test_golden(name: str, result: CheckResult) -> None:
    """Each form reads, to the letter, as its golden file."""
    text = FORMS[name](result) + "\n"
    assert text == expected(f"check/{name}", text)


def test_annotations_are_one_line_each_with_what_github_reserves_spelled_out(result: CheckResult) -> None:
    """A percent sign, a colon and a comma in a text do not end a property or a message."""
    lines = result.annotations()
    assert lines[3] == (
        "::error file=sub/pyproject.toml,line=20,title=planner%3A a|b%3A not planned::"
        "a|b: cannot be built: 100 %25 wrong"
    )
    assert all(line.startswith("::") and "\n" not in line for line in lines)


def test_the_levels_follow_what_the_check_fails_on(result: CheckResult) -> None:
    """What is a no is an error, what is risky and allowed is a warning, and FITS is not found at all."""
    levels = [one["level"] for one in result.to_sarif()["runs"][0]["results"]]
    assert levels == ["note", "error", "error", "error", "error", "note"]


def test_paths_are_those_of_the_repository(tmp_path: Path) -> None:
    """A path is relative to the workspace of a runner, else to the folder with .git, else bare."""
    path = tmp_path / "a" / "b" / "pyproject.toml"
    assert path_in_repository(path, None) == "pyproject.toml"
    assert path_in_repository(path, tmp_path / "a") == "b/pyproject.toml"
    (tmp_path / ".git").mkdir()
    assert path_in_repository(path, Path("/elsewhere")) == "a/b/pyproject.toml"
