"""A child process that answers JSON requests, one on each line of its standard input.

The answers are JSON lines on standard output.
"""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Lock, Timer
from typing import IO, Any

from planner import errors
from planner._support.processes import end_processes, marked_processes, signal_name
from planner.errors import ModelError, PlannerError

MAX_ANSWER_BYTES = 2**24


class WorkerError(Exception):
    """The error for a worker that ended, was stopped at its time limit, or gave an unreadable answer."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(_ending(returncode))
        self.returncode = returncode  # None if the worker was stopped at its time limit


class Worker:
    """A child process that runs in a new session and answers requests.

    The process and all its children end once the `Worker` is unreferenced. With a `mark` (`NAME=VALUE`), a
    variable that no other process has in its environment, daemons that the child started are ended too. A
    request carries a `number`, which the child's answer has to repeat: an answer that an interrupted caller
    left unread is skipped. `serve` is the child's side.
    """

    def __init__(self, command: Sequence[str], stderr: int | IO[bytes] | None = None, mark: str = "") -> None:
        name, _, value = mark.partition("=")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, name: value} if mark else None,
            start_new_session=True,  # Ctrl-C is for the planner, and all its children end with it
        )
        self._numbers = count()
        self._lock = Lock()
        self._is_late = False
        self.close = weakref.finalize(self, _end, self._process, mark)

    def request(self, message: Mapping[str, Any], limit_seconds: float | None = None) -> Any:
        """Send a message to the child and return the child's answer.

        Each line from the child restarts the time limit. Raises WorkerError if no answer comes, and a
        PlannerError if the child answers with an error.
        """
        with self._lock:
            try:
                reply = self._exchange({"number": next(self._numbers), "message": message}, limit_seconds)
            except (OSError, ValueError, LookupError, TypeError):
                self.close()
                raise WorkerError(None if self._is_late else self._process.returncode) from None
        if "error" in reply:
            kind: Any = vars(errors).get(str(reply["error"]))
            is_ours = isinstance(kind, type) and issubclass(kind, PlannerError)
            raise (kind if is_ours else ModelError)(str(reply.get("message"))[:1000])
        return reply["answer"]

    def _exchange(self, request: Mapping[str, Any], limit_seconds: float | None) -> dict[str, Any]:
        """Send a request and return the child's reply to it. Other replies only restart the time limit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            with self._time_limit(limit_seconds):
                reply: dict[str, Any] = json.loads(self._process.stdout.readline(MAX_ANSWER_BYTES))
            if reply["number"] == request["number"] and ("answer" in reply or "error" in reply):
                return reply

    @contextmanager
    def _time_limit(self, seconds: float | None) -> Iterator[None]:
        """Kill the child process if the code inside the context takes longer than `seconds`."""
        if seconds is None:
            yield
            return
        timer = Timer(seconds, self._stop)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self._is_late = True
        _kill(self._process)


def serve(answer: Callable[[Any, Callable[[], None]], Any], failure: str) -> None:
    """Answer a `Worker`'s requests with the results of `answer`, until standard input ends.

    Printed text is redirected to standard error. `answer` is called with a message and a function that
    restarts the time limit. The text of an error that is no PlannerError replaces {} in `failure`.
    """
    requests, lines = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    for line in requests:
        request = json.loads(line)

        def send(number: int = request["number"], **reply: Any) -> None:
            lines.write(json.dumps({"number": number, **reply}).encode() + b"\n")
            lines.flush()

        send(**reply_of(failure, answer, request["message"], send))


def reply_of(failure: str, answer: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Call `answer`, and return {"answer": result}, or {"error": name of the class, "message": text}.

    An error that is no PlannerError is named ModelError, and its text replaces {} in `failure`.
    """
    try:
        return {"answer": answer(*arguments)}
    except PlannerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except BaseException as error:  # an error of a model's code, or an error that it caused
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {"error": ModelError.__name__, "message": failure.format(text)}


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "gave no answer in time"
    if returncode >= 0:
        return f"ended with code {returncode}"
    return f"ended with {signal_name(-returncode) or f'signal {-returncode}'}"


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End the child process, and with a `mark` also the processes that `marked_processes` finds.

    The pipes are closed first. The child is killed if it does not end within 0.2 s.
    """
    daemons = marked_processes(mark) - {process.pid} if mark else ()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # data that is not written yet has no reader
                pipe.close()
    try:
        process.wait(0.2)  # a process that is just ending has its own exit code
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
    for one in daemons:
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)
    if mark:
        end_processes(mark, 0.0)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError):  # it is gone
        os.killpg(process.pid, signal.SIGKILL)
