"""Installations of torch that the emulated GPU takes, refusals of others, and failures of the compiler."""

import shutil
from errno import ENOSPC
from os import strerror
from pathlib import Path

import pytest

from planner.emulator.child.libraries.build import _compiled
from planner.emulator.child.libraries.installation import find_installation
from planner.emulator.child.libraries.tools import EmulatorError, run_tool


def installation(folder: Path, torch: str, cudnn: str) -> Path:
    """Lay out the files that decide, as pip does, and return the folder of torch."""
    major, minor, patch = cudnn.split(".")
    files = {
        "torch/version.py": f"__version__ = '{torch}'\n",
        "torch/lib/libtorch_cuda.so": "",
        "nvidia/cuda_runtime/include/cuda_runtime_api.h": "",
        "nvidia/cudnn/lib/libcudnn.so.9": "",
        "nvidia/cudnn/include/cudnn_version.h": f"#define CUDNN_MAJOR {major}\n#define CUDNN_MINOR {minor}\n"
        f"#define CUDNN_PATCHLEVEL {patch}\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "torch"


@pytest.mark.parametrize(
    ("torch", "cudnn", "package"),
    [("2.6.0+cu124", "9.1.0", "nvidia-cudnn-cu12"), ("2.7.1+cu118", "9.7.1", "nvidia-cudnn-cu11")],
)
def test_a_cudnn_that_takes_no_description_is_refused(
    tmp_path: Path, torch: str, cudnn: str, package: str
) -> None:
    """Convolutions would fail later, so that the line comes first and states what to install."""
    with pytest.raises(EmulatorError) as caught:
        find_installation(installation(tmp_path, torch, cudnn))
    assert str(caught.value) == (
        f"torch {torch}: its cuDNN {cudnn} does not answer for a GPU that is only described; put a newer one "
        f"in its place: pip install '{package}>=9.8'"
    )


def test_the_first_cudnn_that_takes_one_is_not_refused(tmp_path: Path) -> None:
    """The refusal is of a missing library, not of this version of cuDNN."""
    with pytest.raises(EmulatorError) as caught:
        find_installation(installation(tmp_path, "2.6.0+cu124", "9.8.0"))
    assert "cuDNN" not in str(caught.value)


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
CODE = "int answer(void) { return 42; }"


def failure(command: list[str]) -> str:
    """Return the line of a tool that fails on a piece of C."""
    with pytest.raises(EmulatorError) as caught:
        run_tool(command, CODE)
    return str(caught.value)


ROOM = "make room there and in the folder of temporary files, or set XDG_CACHE_HOME and TMPDIR to others"
MEMORY = "another process ended it, or the system where memory was short: free some and run the command again"


@needs_gcc
@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        (["-c", "-o", "/dev/full"], "No space left on device", ROOM),
        (["-shared", "-fPIC", "-o", "/dev/full"], "No space left on device", ROOM),
        (["-c", "-wrapper", "sh,-c,kill -9 $$"], "fatal error: Killed signal terminated program", MEMORY),
        (["-c", "-include", "no_such_header.h"], "no_such_header.h: No such file", "report it with torch's"),
    ],
    ids=["compile on a full disk", "link on a full disk", "a part is killed", "a header is missing"],
)
def test_a_compiler_that_fails_states_the_cause(options: list[str], cause: str, remedy: str) -> None:
    """Room, memory and a whole compiler are the user's to mend; only the rest is for a report."""
    line = failure(["gcc", "-o", "/dev/null", *options, "-x", "c", "-"])
    stated, _, advice = line.rpartition("; ")
    assert stated.startswith("gcc fails on the stand-in libraries: ")
    assert cause in stated and advice.startswith(remedy)


@needs_gcc
@pytest.mark.parametrize(
    ("variables", "options", "missing"),
    [
        ({"GCC_EXEC_PREFIX": "/nowhere/"}, ["-c"], "cannot execute 'cc1': execvp: No such file or directory"),
        ({}, ["-c"], "cannot execute 'as': execvp: No such file or directory"),
    ],
)
def test_a_compiler_without_its_parts_is_to_be_installed_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    options: list[str],
    missing: str,
) -> None:
    """A removal that was stopped leaves gcc without the programs that it starts."""
    gcc = str(shutil.which("gcc"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert failure([gcc, *options, "-x", "c", "-", "-o", "/dev/null"]) == (
        f"gcc fails on the stand-in libraries: gcc: fatal error: {missing}; install gcc again, as with apt "
        "install gcc binutils"
    )


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("kill -9 $$", f"ended by the signal Killed; {MEMORY}"),
        ("kill -15 $$", "ended by the signal Terminated; run the command again"),
        ("exit 3", "exit code 3, without a message; report it with torch's version"),
    ],
)
def test_a_compiler_that_ends_without_a_message_has_its_end_named(
    tmp_path: Path, script: str, end: str
) -> None:
    """A killed tool prints nothing, so the message names the signal or the exit code."""
    gcc = tmp_path / "gcc"
    gcc.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    gcc.chmod(0o700)
    assert failure([str(gcc)]) == f"gcc fails on the stand-in libraries: {end}"


def test_a_compiler_that_is_missing_or_cannot_be_started_is_named(tmp_path: Path) -> None:
    """One is to be installed; the other one has a reason of the system's."""
    gcc = tmp_path / "gcc"
    assert failure([str(gcc)]) == (
        "gcc is missing; the stand-in libraries are compiled on first use: install gcc, as with apt install "
        "gcc"
    )
    gcc.mkdir()
    assert failure([str(gcc)]) == (
        "gcc cannot be started to compile the stand-in libraries: Permission denied"
    )


def test_a_disk_without_room_for_the_compiled_libraries_is_named(tmp_path: Path) -> None:
    """The folder stands in the line, and what to do."""

    def compile_into(work: Path, out: Path) -> None:
        raise OSError(ENOSPC, strerror(ENOSPC))

    with pytest.raises(EmulatorError) as caught:
        _compiled(tmp_path, "key", "for a test", compile_into)
    assert str(caught.value) == (
        f"{tmp_path}: the compiled libraries cannot be cached there: No space left on device; mend that, or "
        "set XDG_CACHE_HOME to another folder"
    )
