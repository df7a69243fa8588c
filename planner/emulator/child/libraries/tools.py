"""Run the tools of a compiler, and state the cause if a tool fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

_UNKNOWN = "report it with torch's version"
# Patterns for messages of gcc and binutils, each with a remedy; the first pattern that matches is the cause.
_CAUSES = (
    (
        r"No space left on device|Disk quota exceeded",
        "make room there and in the folder of temporary files, or set XDG_CACHE_HOME and TMPDIR to others",
    ),
    (r"Cannot create temporary file", "set TMPDIR to a folder that can be written"),
    (r"cannot execute .*execvp|cannot find .ld\b", "install gcc again, as with apt install gcc binutils"),
    (
        r"Killed signal terminated|ended by the signal Killed",
        "another process ended it, or the system where memory was short: free some and run the command again",
    ),
    (r"ended by the signal Terminated|Terminated signal terminated", "run the command again"),
)


class EmulatorError(Exception):
    """Raised, with a line that says what to do, if stand-in libraries cannot be built or loaded."""


def run_tool(command: list[str], text: str | None = None) -> str:
    """Run a tool of the compiler with `text` as standard input, and return its standard output.

    Raises EmulatorError if the tool is missing, cannot be started, fails or is ended by a signal.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "LC_ALL": "C"},  # its messages are read
        )
    except FileNotFoundError:
        raise EmulatorError(
            f"{name} is missing; the stand-in libraries are compiled on first use: install gcc, as with apt "
            "install gcc"
        ) from None
    except OSError as error:
        raise EmulatorError(
            f"{name} cannot be started to compile the stand-in libraries: {error.strerror}"
        ) from error
    if done.returncode:
        raise EmulatorError(_failure(name, done.returncode, done.stderr))
    return done.stdout


def _failure(name: str, code: int, printed: str) -> str:
    """Return why a tool failed, by its exit code and standard error, and what to do."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    end = f"ended by the signal {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
    for pattern, remedy in _CAUSES:
        for line in (*lines, end):
            if re.search(pattern, line):
                return f"{name} fails on the stand-in libraries: {line[:300]}; {remedy}"
    line = (
        next((line for line in lines if "error" in line), "".join(lines[:1])) or f"{end}, without a message"
    )
    return f"{name} fails on the stand-in libraries: {line[:300]}; {_UNKNOWN}"
