"""Find and end the processes that a command or a worker left running, and name signals.

A process is recognized by a mark in the environment with which it was started, or as a descendant of a marked
process. Environments are read from /proc, so on systems other than Linux no process is found.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

_PROCESSES = Path("/proc")
_POLL_SECONDS = 0.05


def signal_name(number: int) -> str:
    """Return the name of a signal, or "" if no signal has the number."""
    return next((one.name for one in signal.Signals if one == number), "")


def marked_processes(mark: str) -> frozenset[int]:
    """Return the IDs of all processes that have `mark` in their environment, and of their descendants.

    `mark` is an environment variable as `NAME=VALUE`. Zombies and the calling process are left out.
    """
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended, or is another account's
            number = int(folder.name)
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state == "Z" or number == os.getpid():
                continue
            parents[number] = int(parent)
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(number)
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return frozenset(found)


def end_processes(mark: str, grace_seconds: float) -> frozenset[int]:
    """End the processes that `marked_processes` finds, and return the IDs of any that still run.

    SIGTERM is sent first. SIGKILL is sent to processes that still run `grace_seconds` after SIGTERM.
    """
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 1.0)):
        limit = monotonic() + seconds
        told: set[int] = set()
        while living := marked_processes(mark):
            for one in living - told:
                with suppress(OSError):
                    os.kill(one, number)
            told |= living
            if monotonic() > limit:
                break
            sleep(_POLL_SECONDS)
    return marked_processes(mark)
