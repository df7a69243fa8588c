"""`planner check` as a person, a pipeline and GitHub's runner call it."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli import run
from tests.helpers.command_line import Capture

HEAD = '[tool.planner]\ngpus = ["RTX 4090"]\n'
FITS = '[tool.planner.jobs.small]\nmodel = "resnet50"\nbatch = 8\n'
DIES = '[tool.planner.jobs.big]\nmodel = "resnet50"\nbatch = 4000\n'
FILE = """
from torch import nn


def build():
    return nn.Linear(16, 4)


def broken():
    return nn.Linear(16, "100 % broken")
"""
OWN = """[tool.planner.jobs.{0}]
model = "models.py:{0}"
batch = 8
input = ["16"]
target = "4"
loss = "mse"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose folder `inner` is the current one, outside of GitHub's Actions."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".git").mkdir()
    (tmp_path / "inner").mkdir()
    (tmp_path / "models.py").write_text(FILE)
    monkeypatch.chdir(tmp_path / "inner")
    return tmp_path


def configure(project: Path, *parts: str) -> Path:
    path = project / "pyproject.toml"
    path.write_text("".join(parts))
    return path


def answer(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["check", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_job_that_fits_is_a_yes(project: Path, capsys: Capture) -> None:
    """The file is found from a folder below, and each job has its verdict and figures."""
    configure(project, HEAD, FITS)
    code, checked = answer(capsys)
    (row,) = checked["rows"]
    assert (code, checked["ok"], row["verdict"], row["line"]) == (0, True, "FITS", 3)
    assert 0 < row["process_mib"] <= row["process_upper_mib"] < row["available_mib"]
    assert row["largest_batch"] is None


@pytest.mark.slow
def test_a_job_that_does_not_fit_is_a_no_with_the_batch_that_would(project: Path, capsys: Capture) -> None:
    """OUT OF MEMORY is exit code 1, and the largest batch is what `planner max-batch` answers."""
    configure(project, HEAD, FITS, DIES)
    code, checked = answer(capsys)
    assert (code, checked["ok"]) == (1, False)
    verdicts = {row["job"]: row["verdict"] for row in checked["rows"]}
    assert verdicts == {"small": "FITS", "big": "OUT OF MEMORY"}
    assert run(["max-batch", "--model", "resnet50", "--gpu", "RTX 4090", "--json"]) == 0
    largest = json.loads(capsys.readouterr().out)["comfortable_batch"]
    assert checked["rows"][1]["largest_batch"] == largest


def test_the_figures_are_those_of_estimate(project: Path, capsys: Capture) -> None:
    """A job has the memory and the probability that `planner estimate` gives it."""
    configure(project, HEAD, FITS, 'optimizer = "adamw"\nprecision = "amp-bf16"\n')
    _, checked = answer(capsys)
    words = "estimate --model resnet50 --batch 8 --gpu 4090 --optimizer adamw --precision amp-bf16 --json"
    assert run(words.split()) == 0
    estimated = json.loads(capsys.readouterr().out)
    same = ("process_mib", "process_upper_mib", "p_out_of_memory", "fits", "confidence")
    assert {key: checked["rows"][0][key] for key in same} == {key: estimated[key] for key in same}


@pytest.mark.slow
def test_the_largest_batch_keeps_to_a_budget(project: Path, capsys: Capture) -> None:
    """Under a budget the largest batch is one that fits it, while the next does not."""
    configure(project, '[tool.planner]\nbudget = "8GiB"\nheadroom = "0%"\n', DIES)
    _, checked = answer(capsys)
    largest = checked["rows"][0]["largest_batch"]
    for batch, expected in ((largest, "FITS"), (largest + 1, "RISKY")):
        configure(
            project, '[tool.planner]\nbudget = "8GiB"\nheadroom = "0%"\n', DIES.replace("4000", str(batch))
        )
        assert answer(capsys)[1]["rows"][0]["verdict"] == expected


@pytest.mark.parametrize(("fail_on", "code"), [("out-of-memory", 0), ("risky", 0), ("tight", 1)])
def test_fail_on_decides_what_is_a_no(project: Path, capsys: Capture, fail_on: str, code: int) -> None:
    """A job without the headroom is TIGHT, which is a no only where the user says so."""
    configure(project, HEAD, 'headroom = "99%"\n', FITS)
    assert answer(capsys, "--fail-on", fail_on)[0] == code
    configure(project, HEAD, f'headroom = "99%"\nfail_on = "{fail_on}"\n', FITS)
    assert answer(capsys)[0] == code


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("[project]\n", [], "no pyproject.toml with [tool.planner]"),
        (HEAD + FITS + "bacth = 1\n", [], "line 6, tool.planner.jobs.small.bacth: unknown key"),
        (HEAD + FITS, ["--fail-on", "all"], "--fail-on: unknown value 'all'"),
        (HEAD + FITS, ["--config", "none.toml"], "none.toml: not readable"),
        (HEAD + FITS + 'input = ["3x32..64x32"]\n', [], "tool.planner.jobs.small: "),
        (HEAD + OWN.format("build"), [], "line 4, tool.planner.jobs.build.model: 'models.py:build' would"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(
    project: Path, capsys: Capture, text: str, arguments: list[str], expected: str
) -> None:
    """A mistake in the configuration is exit code 2 and one line with its place."""
    configure(project, text)
    assert run(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)


def test_a_model_of_the_project_is_found_beside_its_configuration(project: Path, capsys: Capture) -> None:
    """FILE.py:NAME is relative to the file that names it, whatever the current folder is."""
    configure(project, HEAD, OWN.format("build"))
    code, checked = answer(capsys, "--allow-code")
    assert (code, checked["rows"][0]["verdict"]) == (0, "FITS")
    assert Path.cwd() == project / "inner"


def test_a_job_that_cannot_be_planned_leaves_the_others_their_answers(project: Path, capsys: Capture) -> None:
    """A model that cannot be built is exit code 3 and one line, and the other jobs are planned."""
    configure(project, HEAD, OWN.format("broken"), OWN.format("build"))
    assert run(["check", "--json", "--allow-code"]) == 3
    printed = capsys.readouterr()
    checked = json.loads(printed.out)
    assert [row["job"] for row in checked["rows"]] == ["build"]
    assert [(one["job"], one["line"]) for one in checked["failures"]] == [("broken", 3)]
    assert printed.err.startswith("planner: job broken cannot be planned: ")
    assert len(printed.err.splitlines()) == 1


def test_sarif_and_summary_are_written_to_their_files(project: Path, capsys: Capture) -> None:
    """The findings stand at the line of their job, and JSON stays alone on standard output."""
    configure(project, HEAD, FITS, DIES)
    code, _ = answer(capsys, "--sarif", "out.sarif", "--summary", "out.md")
    (result,) = json.loads(Path("out.sarif").read_text())["runs"][0]["results"]
    location = result["locations"][0]["physicalLocation"]
    assert (code, result["ruleId"], result["level"]) == (1, "out-of-memory", "error")
    assert location["artifactLocation"]["uri"] == "pyproject.toml"
    assert location["region"] == {"startLine": 6}
    assert "| big | 4,000 | RTX 4090 24GB | ❌ OUT OF MEMORY |" in Path("out.md").read_text(encoding="utf-8")


def test_annotations_are_printed_where_they_are_wanted(project: Path, capsys: Capture) -> None:
    """Without --annotations and outside of GitHub's Actions there is none."""
    configure(project, HEAD, DIES)
    assert run(["check"]) == 1
    assert capsys.readouterr().err == ""
    assert run(["check", "--annotations"]) == 1
    assert capsys.readouterr().err.startswith("::error file=pyproject.toml,line=3,title=planner%3A big")


def test_in_actions_annotations_and_the_summary_come_by_themselves(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """In GitHub's Actions the summary is added to what the job's has already."""
    configure(project, HEAD, DIES)
    summary = tmp_path / "summary"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project))
    assert run(["check", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"]
    assert printed.err.startswith("::error file=pyproject.toml,line=3,")
    assert summary.read_text(encoding="utf-8").startswith("before\n### GPU memory")
