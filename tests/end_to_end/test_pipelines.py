"""The GitHub Action and the pre-commit hook, run as GitHub's runner and pre-commit run them.

Both install the planner from this repository, without its dependencies, which are those of this environment.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = sysconfig.get_path("purelib")
# pip reads a 0 here as "no isolation".
OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
FITS = '[tool.planner]\ngpus = ["RTX 4090"]\n\n[tool.planner.jobs.one]\nmodel = "resnet50"\nbatch = 8\n'
DIES = FITS.replace("batch = 8", "batch = 4000")
OWN = FITS.replace('"resnet50"', '"models.py:build"\ninput = ["16"]\ntarget = "4"\nloss = "mse"')
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def project(folder: Path, config: str) -> Path:
    """A repository whose files are staged."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(config)
    (folder / "models.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(16, 4)\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    return folder


def validated(*arguments: str) -> str:
    """What check-jsonschema prints."""
    command = [sys.executable, "-m", "check_jsonschema", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_the_action_is_as_github_describes_actions() -> None:
    """action.yml is valid by GitHub's schema of actions."""
    assert "ok -- validation done" in validated(
        "--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml")
    )


def test_the_documented_workflow_is_as_github_describes_workflows(tmp_path: Path) -> None:
    """The workflow of docs/check.md is valid by GitHub's schema, and gives the action inputs that it has."""
    page = (ROOT / "docs/check.md").read_text(encoding="utf-8")
    (text,) = (body for body in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "jobs:" in body)
    path = tmp_path / "planner.yml"
    path.write_text(text)
    assert "ok -- validation done" in validated("--builtin-schema", "vendor.github-workflows", str(path))
    steps = yaml.safe_load(text)["jobs"]["memory"]["steps"]
    (given,) = (step["with"] for step in steps if "gpu-batch-planner" in step.get("uses", ""))
    assert given.keys() <= ACTION["inputs"].keys()


@pytest.mark.parametrize("name", ["measurement", "wrong_figure"])
def test_the_issue_forms_are_as_github_describes_them(name: str) -> None:
    """Each form of an issue is valid by GitHub's schema."""
    form = str(ROOT / f".github/ISSUE_TEMPLATE/{name}.yml")
    assert "ok -- validation done" in validated("--builtin-schema", "vendor.github-issue-forms", form)


def test_the_hooks_of_contributors_are_as_pre_commit_describes_them() -> None:
    """.pre-commit-config.yaml is valid, and its tools are those of the pinned environment."""
    config = ROOT / ".pre-commit-config.yaml"
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(config)]
    subprocess.run(command, check=True)
    (repository,) = yaml.safe_load(config.read_text(encoding="utf-8"))["repos"]
    entries = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert entries == {".venv/bin/ruff", ".venv/bin/clang-format", ".venv/bin/lint-imports", "make"}


# ---- the Action


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a runner, which has pip, and beside it the dependencies of the planner."""
    folder = tmp_path_factory.mktemp("runner") / "python"
    venv.create(folder, with_pip=True, symlinks=True)
    return folder


def run_action(environment: Path, workspace: Path, **inputs: str) -> tuple[int, dict[str, str], str, str]:
    """Run the steps of the action as documented for composite actions and `shell: bash`.

    Returns the exit code, the outputs, the summary, and what is printed.
    """
    given = {name: declared["default"] for name, declared in ACTION["inputs"].items()} | inputs
    files = {name: workspace.parent / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    base = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
    base |= {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": PACKAGES, **OFFLINE}
    base |= {"CI": "true", "GITHUB_ACTIONS": "true", "GITHUB_ACTION_PATH": str(ROOT)}
    base |= {"GITHUB_WORKSPACE": str(workspace), **{name: str(file) for name, file in files.items()}}
    printed, code = "", 0
    for step in ACTION["runs"]["steps"]:
        if "if" in step and not holds(step["if"], given):
            continue
        script = workspace.parent / "script.sh"
        script.write_text(step["run"])
        own = {name: filled(text, given) for name, text in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=workspace, env=base | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        printed, code = printed + done.stdout, done.returncode
        if code:
            break
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    return code, outputs, files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8"), printed


def filled(text: str, inputs: dict[str, str]) -> str:
    """A text with the expressions of the runner replaced; only inputs occur."""
    return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], text)


def holds(condition: str, inputs: dict[str, str]) -> bool:
    name, expected = re.fullmatch(r"inputs\.([\w-]+) == '(\w+)'", condition).groups()  # type: ignore[union-attr]
    return inputs[name] == expected


@pytest.mark.slow
def test_the_action_installs_the_planner_and_annotates(environment: Path, tmp_path: Path) -> None:
    """A job that does not fit fails the step, with an annotation at its line, a summary and SARIF."""
    workspace = project(tmp_path / "work", DIES)
    code, outputs, summary, printed = run_action(environment, workspace, sarif="out.sarif")
    assert (code, outputs) == (1, {"exit-code": "1"})
    assert "::error file=pyproject.toml,line=4,title=planner%3A one%3A OUT OF MEMORY::" in printed
    assert "| one | 4,000 | RTX 4090 24GB | ❌ OUT OF MEMORY |" in summary
    assert '"ruleId": "out-of-memory"' in (workspace / "out.sarif").read_text()
    assert (environment / "bin" / "planner").is_file()


@pytest.mark.slow
def test_the_action_plans_code_of_the_repository(environment: Path, tmp_path: Path) -> None:
    """A model of the repository is planned unless allow-code is false, which is wrong configuration."""
    workspace = project(tmp_path / "work", OWN)
    assert run_action(environment, workspace)[:2] == (0, {"exit-code": "0"})
    code, outputs, _, printed = run_action(
        environment, workspace, install="false", **{"allow-code": "false", "config": "pyproject.toml"}
    )
    assert (code, outputs) == (2, {"exit-code": "2"})
    assert "would run code" in printed


@pytest.mark.slow
def test_the_action_takes_what_fails_it(environment: Path, tmp_path: Path) -> None:
    """A value of an input reaches the command as one word, whatever is in it."""
    workspace = project(tmp_path / "work", FITS)
    code, _, _, printed = run_action(environment, workspace, **{"fail-on": 'x"; exit 0; "'})
    assert code == 2
    assert "--fail-on: unknown value" in printed


# ---- pre-commit


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="pre-commit clones a repository; this is none")
@pytest.mark.parametrize(("config", "code", "shown"), [(FITS, 0, "Passed"), (DIES, 1, "1 OUT OF MEMORY")])
def test_the_hook_runs_in_pre_commit(tmp_path: Path, config: str, code: int, shown: str) -> None:
    """pre-commit installs the hook from this repository, and a job that does not fit fails the commit."""
    folder = project(tmp_path / "work", config)
    environment = os.environ | OFFLINE | {"PRE_COMMIT_HOME": str(tmp_path / "home"), "PYTHONPATH": PACKAGES}
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "try-repo", str(ROOT), "planner-check", "--all-files"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert shown in done.stdout
