"""A child process that answers each line of JSON on its standard input with one on its standard output."""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Lock, Timer
from typing import IO, Any

MAX_ANSWER_BYTES = 2**24


class WorkerError(Exception):
    """The worker gave no answer: it ended, or it was stopped at its time limit."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(_ending(returncode))
        self.returncode = returncode  # None: the time limit


class Worker:
    """A child process in a session of its own, which ends with all its children once it is not referenced.

    A request carries a `number`, which its answer has to repeat: an answer that an interrupted caller left
    unread is skipped.
    """

    def __init__(self, command: Sequence[str], stderr: int | IO[bytes] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for the planner, and all its children end with it
        )
        self._numbers = count()
        self._lock = Lock()
        self.close = weakref.finalize(self, _end, self._process)

    def request(self, message: Mapping[str, Any], limit_seconds: float | None = None) -> Any:
        """Send a message and return the `answer` to it. Raises WorkerError where none comes."""
        with self._lock:
            limit = _TimeLimit(limit_seconds, self._process)
            try:
                return self._exchange(next(self._numbers), message, limit)
            except (OSError, ValueError, LookupError, TypeError):
                self.close()
                raise WorkerError(None if limit.is_over else self._process.returncode) from None
            finally:
                limit.cancel()

    def _exchange(self, number: int, message: Mapping[str, Any], limit: "_TimeLimit") -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"number": number, "message": message}).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            answered = json.loads(self._process.stdout.readline(MAX_ANSWER_BYTES))
            if answered["number"] != number:
                continue
            if "answer" in answered:
                return answered["answer"]
            limit.restart()


class _TimeLimit:
    """Kills a process when its time is over; each line that it writes without an answer restarts it."""

    def __init__(self, seconds: float | None, process: "subprocess.Popen[bytes]") -> None:
        self._seconds, self._process, self.is_over = seconds, process, False
        self._timer: Timer | None = None
        self.restart()

    def restart(self) -> None:
        self.cancel()
        if self._seconds is not None:
            self._timer = Timer(self._seconds, self._stop)
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _stop(self) -> None:
        self.is_over = True
        _kill(self._process)


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "gave no answer in time"
    if returncode >= 0:
        return f"ended with code {returncode}"
    names = {number.value: number.name for number in signal.Signals}  # not of all real-time signals
    return f"ended with {names.get(-returncode, f'signal {-returncode}')}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop the process, unless it ends by itself, and wait for it."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was still to be written has no reader
                pipe.close()
    try:
        process.wait(0.2)  # one that is just ending has a code of its own
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError):  # it is gone
        os.killpg(process.pid, signal.SIGKILL)
