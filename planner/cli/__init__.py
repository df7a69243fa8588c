"""The command `planner`.

It runs a command line, prints a report or JSON, and turns errors into exit codes. Exit codes: 0 done; 1 the
answer is no; 2 wrong usage; 3 the model cannot be built or traced; 4 a data file is broken, or the answer or
a file cannot be written; 5 a GPU is needed and there is none; 70 an error of the planner itself (EX_SOFTWARE,
so that a crash is never mistaken for a no); 130 interrupted; 141 the reader of standard output has closed it;
143 ended by SIGTERM.
"""

import errno
import gc
import os
import sys
import warnings
from typing import TextIO

from planner._support.printable import printable, shortened
from planner.cli.ending import INTERRUPTED, EndedError, Ending
from planner.errors import DataFileError, PlannerError, UsageError

INTERNAL, BROKEN_PIPE = 70, 141
# Errors that prevent writing to standard output: a full disk, a file size limit, or a closed stream.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
# Errors that prevent access to a path: a folder without permission, an impossible name.
_UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
_INSTALLABLE = {
    "torch": "torch is not installed: this job has to be traced; pip install torch torchvision. Unchanged "
    "jobs of the catalogue are planned without it, and so is --trace FILE",
}
_CLOSED = "is closed, so that the answer cannot be written; send it to /dev/null to discard it"


def main() -> None:
    """Run this process's command line and exit with its code."""
    # Imports create a million objects that live to the end. Searching them for garbage repeatedly, and once
    # more at the exit, would take a third of the time (benchmarks/speed/startup.py).
    gc.set_threshold(100_000, 50, 100)
    _ensure_std_streams()
    if "--debug" not in sys.argv:
        sys.unraisablehook = lambda _: None  # errors in a model's finalizers are no errors of the plan
    code = Ending().guard(lambda: run(sys.argv[1:]))
    gc.freeze()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code; print each error, except a closed pipe, as one line."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own  # an option of a command after -- does not count
    try:
        if "_PLANNER_COMPLETE" in os.environ and _complete():
            return 0
        # Imported here, so that an interrupt during the imports ends as quietly as any other.
        from planner.cli.parser import parse

        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            code = parse(arguments)()
            sys.stdout.flush()
            return code
    except PlannerError as error:
        return _print_error(str(error), error.exit_code, debug)
    except EndedError as error:
        error.settle()
        return _print_error(error.line, error.code, debug)
    except KeyboardInterrupt:
        return _print_error("interrupted", INTERRUPTED, debug)
    except BrokenPipeError:
        _detach_stream(sys.stdout)
        return BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
            _detach_stream(sys.stdout)
            why = _CLOSED if error.errno == errno.EBADF else error.strerror
            return _print_error(f"standard output: {why}", DataFileError.exit_code, debug)
        if isinstance(error, OSError) and error.errno in _UNREACHABLE and error.filename is not None:
            problem = f"{error.filename}: cannot be reached: {error.strerror}; check the path"
            return _print_error(problem, DataFileError.exit_code, debug)
        if isinstance(error, ModuleNotFoundError) and error.name in _INSTALLABLE:
            return _print_error(_INSTALLABLE[error.name], UsageError.exit_code, debug)
        kind = type(error).__name__
        return _print_error(
            f"internal error: {kind}: {error}; run with --debug and report it", INTERNAL, debug
        )


def _ensure_std_streams() -> None:
    """Replace standard streams that were closed when the process started (`>&-`).

    Without standard error, messages are dropped. Without standard output nobody can read the answer, so each
    write to it fails, as on a full disk; its descriptor is taken, so that no file is opened under it.
    """
    if sys.stderr is None:
        sys.stderr = _stand_in(2, os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = _stand_in(1, os.O_RDONLY)


def _stand_in(number: int, way: int) -> TextIO:
    """Open the null device in mode `way` at descriptor `number`, and return a text stream for it."""
    opened = os.open(os.devnull, way)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    return os.fdopen(number, "w")


def _detach_stream(stream: TextIO) -> None:
    """Redirect a broken stream to the null device. Python flushes the stream once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complete() -> bool:
    """Print the reply to a shell's completion request, and return whether there was a request."""
    from planner.cli.completion.shells import answer_shell

    reply = answer_shell(os.environ)
    if reply is not None:
        print(reply, flush=True)
    return reply is not None


def _print_error(message: str, code: int, debug: bool) -> int:
    """Print an error as one line on standard error, and return the exit code.

    With `debug`, a traceback is printed first.
    """
    try:
        if debug:
            import traceback  # imported late: 3 ms

            traceback.print_exc()
        print(f"planner: {printable(shortened(' '.join(message.split())))}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads it, or the disk is full; the exit code is kept
        _detach_stream(sys.stderr)
    return code
