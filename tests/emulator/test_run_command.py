"""`planner run` in an environment whose torch is built without CUDA, or that has no torch at all."""

import subprocess
import sys
from pathlib import Path

import pytest

PLANNER = [sys.executable, "-m", "planner", "run"]


def planner_run(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command line as a user does."""
    return subprocess.run([*PLANNER, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--", "python"], "say which GPU is emulated: --gpu NAME or --gpu-mib N, one of them"),
        (["--gpu", "L4"], "no command: write it behind --, as in planner run --gpu L4 -- python train.py"),
        (
            ["--gpu", "L4", "--", "no-such-command"],
            "no-such-command: cannot be started: No such file or directory",
        ),
        (
            ["--gpu", "L4", "--gpus", "0", "--", "x"],
            "--gpus: '0' is refused; use a whole number from 1 to 64",
        ),
        (
            ["--gpu", "L4", "--copy-bytes", "-1", "--", "x"],
            "--copy-bytes: '-1' is refused; use a whole number from 0 to",
        ),
        (["--gpu", "GTX 1080", "--", "x"], "GTX 1080 8GB: compute capability 6.1 is not emulated"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    """Wrong usage is one line, with exit code 2."""
    done = planner_run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert line in done.stderr


def test_a_command_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    """A script that never touches CUDA shows nothing about a GPU; exit code 3."""
    done = planner_run("--gpu", "L4", "--", sys.executable, "-c", "print('hello')", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "hello\n")
    assert "it ended without using a GPU; check that it trains on cuda" in done.stderr


def test_a_command_that_fails_before_it_uses_a_gpu_is_distinguished(tmp_path: Path) -> None:
    """The command's own message stands above; exit code 3."""
    done = planner_run("--gpu", "L4", "--", sys.executable, "-c", "exit(5)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith(": it ended with exit code 5 before it used a GPU\n")


def test_options_of_the_command_are_the_commands(tmp_path: Path) -> None:
    """Everything behind -- belongs to the command."""
    code = "import sys; print(sys.argv[1:])"
    done = planner_run("--gpu", "L4", "--", sys.executable, "-c", code, "--gpu", "T4", "--json", cwd=tmp_path)
    assert done.stdout == "['--gpu', 'T4', '--json']\n"


def test_debug_of_the_command_is_the_commands(tmp_path: Path) -> None:
    """An error of the planner stays one line whatever options the command has."""
    done = planner_run("--gpu", "L4", "--", "no-such-command", "--debug", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_the_environments_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    """Ours hides it, and hands on to it."""
    (tmp_path / "sitecustomize.py").write_text("print('own')\n", encoding="utf-8")
    again = f"os.execv({sys.executable!r}, ['python', '-c', ''])"
    code = f"import os; os.environ['PYTHONPATH'] += ':{tmp_path}'; {again}"
    done = planner_run("--gpu", "L4", "--", sys.executable, "-c", code, cwd=tmp_path)
    assert done.stdout == "own\n"


def test_a_build_without_cuda_is_refused_in_one_line(tmp_path: Path) -> None:
    """The emulated GPU runs torch's CUDA build; the line states where it looked and what to do."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build")
    done = planner_run("--gpu", "L4", "--", sys.executable, "-c", "import torch", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "is built without CUDA; run the command in an environment that has the CUDA build" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--gpu", "L4", "--", "python", "x"],
            "the command has no {batch}: write it in place of the batch size",
        ),
        (
            ["--gpu", "L4", "--model", "resnet50", "--", "x", "{batch}"],
            "--model has no effect with a command",
        ),
        (
            ["--gpu", "L4", "--optimizer", "adam", "--", "x", "{batch}"],
            "--optimizer has no effect with a command",
        ),
        (
            ["--gpu", "L4", "--method", "formula", "--", "x", "{batch}"],
            "--method has no effect with a command",
        ),
        (["--gpu", "L4", "--no-calibration", "--", "x", "{batch}"], "--no-calibration has no effect with"),
        (["--", "x", "{batch}"], "say which GPU is emulated: --gpu NAME or --gpu-mib N, one of them"),
        (["--gpu", "L4", "--gpus", "2", "--model", "resnet50"], "--gpus is for a command behind --"),
        (["--gpu", "L4", "--stop-after", "2", "--model", "resnet50"], "--stop-after is for a command behind"),
        (
            ["--gpu", "L4", "--stop-after", "0", "--", "x", "{batch}"],
            "--stop-after: '0' is refused; use a whole",
        ),
        (
            ["--gpu", "L4", "--confidence", "0.1", "--", "x", "{batch}"],
            "--confidence 0.1: give a probability",
        ),
    ],
)
def test_wrong_usage_of_a_search_is_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    """A command names the run itself, which no option may name too."""
    command = [sys.executable, "-m", "planner", "max-batch", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert line in done.stderr
