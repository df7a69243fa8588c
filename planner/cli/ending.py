"""End the process on Ctrl-C and SIGTERM by raising an exception.

The exception unwinds any running code.
"""

import _thread
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

_MOST_SWALLOWED = 100  # most exceptions that code may swallow before the process ends without unwinding
_WAIT_SECONDS = 0.05  # between two looks at whether torch is imported

INTERRUPTED, ENDED = 130, 143


class EndedError(KeyboardInterrupt):
    """The exception that SIGTERM or Ctrl-C raises.

    `except Exception` does not catch it. The code that reports the exception calls `settle`, after which both
    signals are ignored.
    """

    def __init__(self, number: int, settle: Callable[[], None]) -> None:
        super().__init__()
        self.code = ENDED if number == signal.SIGTERM else INTERRUPTED
        self.line = "ended by SIGTERM" if number == signal.SIGTERM else "interrupted"
        self.settle = settle


class Ending:
    """The handler of SIGINT and SIGTERM.

    It raises EndedError to end this process. A model's code and callbacks of C may swallow the exception. So
    a weak reference watches the exception, which lives while it unwinds the stack: if it is freed before it
    is reported, the signal is sent again.
    """

    def __init__(self) -> None:
        self._swallowed = 0
        self._error: weakref.ref[EndedError] | None = None  # the exception that unwinds the stack
        self._number = 0  # number of the signal that arrived, or 0 if no signal arrived
        self._is_settled = False
        self._exit = os._exit  # saved, since a model or a capture may replace it

    def guard(self, run: Callable[[], int]) -> int:
        """Run a function with SIGINT and SIGTERM handled, and return its exit code.

        If `run` did not report a signal that arrived, the signal is reported, and the exit code is the
        signal's.
        """
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else interrupts are ignored
            signal.signal(signal.SIGINT, self._end)
        signal.signal(signal.SIGTERM, self._end)
        code = INTERRUPTED
        try:
            code = run()
            was_settled, self._is_settled = self._is_settled, True
        except EndedError:
            was_settled = False
        self.settle()
        if self._number and not was_settled:
            error = self._make_error()
            print(f"planner: {error.line}", file=sys.stderr, flush=True)
            return error.code
        return code

    def settle(self) -> None:
        """Ignore SIGTERM and SIGINT until the process ends, since the exit code is final."""
        self._is_settled = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _make_error(self) -> EndedError:
        return EndedError(self._number, self.settle)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise EndedError, unless one is raised already or the exit code is final.

        So workers end, and no file is left incomplete. Nothing is done if the exit code is final or an
        EndedError unwinds the stack already. During the first import of torch the signal is sent again later.
        After too many swallowed exceptions the process ends without unwinding.
        """
        if self._is_settled or (self._error is not None and self._error() is not None):
            return
        self._number = self._number or number
        if _is_importing_torch(frame):
            _thread.start_new_thread(self._send_later, ())
            return
        if self._swallowed > _MOST_SWALLOWED:
            self._leave()
        raise self._watched_error()

    def _send_later(self) -> None:
        time.sleep(_WAIT_SECONDS)
        if not self._is_settled:
            os.kill(os.getpid(), self._number)

    def _watched_error(self) -> EndedError:
        """Return an EndedError that sends the signal again if it is freed before it is reported.

        No frame of the traceback may refer to the exception, since a reference would keep it alive.
        """
        error = self._make_error()
        self._error = weakref.ref(error, self._send_again)
        return error

    def _send_again(self, _: Any) -> None:
        """Send the signal again, since its exception was freed before it was reported.

        A thread sends it, since an exception raised in a callback of a weak reference is lost. If the signal
        arrives while the callback still runs, its exception is lost too, and the signal is sent once more.
        """
        if not self._is_settled:
            self._swallowed += 1
            _thread.start_new_thread(os.kill, (os.getpid(), self._number))

    def _leave(self) -> NoReturn:
        self._is_settled = True
        error = self._make_error()
        os.write(2, f"planner: {error.line}\n".encode())
        self._exit(error.code)


def _is_importing_torch(frame: FrameType | None) -> bool:
    """Return whether a frame runs inside of torch's first import.

    There torch's own C++ code calls Python and ends the process by `std::terminate` if an exception passes.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False
