"""The command `planner`: options in, a report or JSON out, errors as one line and an exit code.

Exit codes: 0 done; 1 the honest answer is no; 2 wrong usage; 3 the model cannot be built or traced; 4 a data
file is broken; 5 a GPU is needed and there is none; 70 an error of the planner itself (EX_SOFTWARE, so that a
crash is never taken for a no); 130 interrupted; 141 whoever read standard output went away.
"""

import errno
import gc
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TextIO

from planner.errors import DataFileError, PlannerError

INTERNAL, INTERRUPTED, BROKEN_PIPE = 70, 130, 141
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Run the command line of this process and exit."""
    # Imports make a million objects that live to the end. Looking through them for garbage again and again,
    # and once more at the exit, would take a third of the time (benchmarks/startup.py).
    gc.set_threshold(100_000, 50, 100)
    _open_what_is_closed()
    code = run(sys.argv[1:])
    gc.freeze()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line and give its exit code: the one place where errors become a line and a code."""
    debug = "--debug" in arguments
    try:
        if "_PLANNER_COMPLETE" in os.environ and _complete():
            return 0
        # Here and not above, so that an interrupt during the imports ends as quietly as any other.
        from planner.cli.parse import parse

        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            code = parse(arguments)()
            sys.stdout.flush()
            return code
    except PlannerError as error:
        return _complain(str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED, debug)
    except BrokenPipeError:
        _let_go_of(sys.stdout)
        return BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            _let_go_of(sys.stdout)
            return _complain(f"standard output: {error.strerror}", DataFileError.exit_code, debug)
        kind = type(error).__name__
        return _complain(f"internal error: {kind}: {error}; run with --debug and report it", INTERNAL, debug)


def _open_what_is_closed() -> None:
    """Whoever started the process without a stream (`2>&-`) wants nothing from it but the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open to the end


def _let_go_of(stream: TextIO) -> None:
    """Python flushes once more when it exits; now there is somebody to take it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complete() -> bool:
    """Answer a shell that asks what may stand at the cursor."""
    from planner.cli.completion import answer_shell

    found = answer_shell(os.environ)
    if found is not None:
        print(found, flush=True)
    return found is not None


def _complain(message: str, code: int, debug: bool) -> int:
    """One line on standard error, after the traceback of the error in flight if that is wanted."""
    try:
        if debug:
            traceback.print_exc()
        print(f"planner: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads it, or the disk is full; the code tells
        _let_go_of(sys.stderr)
    return code
