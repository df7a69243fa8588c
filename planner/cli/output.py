"""Write the answer to standard output, and progress to standard error.

Standard output gets nothing else.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple, TextIO

from planner._support.printable import printable, shortened
from planner.errors import UnsavedError
from planner.program import OnProgress
from planner.report import Result, render

SILENT_SECONDS = 2  # after which a line of progress shows its time
WIDEST = 120  # columns of a report on a terminal: longer lines are hard to read


class Output(NamedTuple):
    """The format in which a command prints its answer: JSON or a report."""

    json: bool


def emit(result: Result, output: Output) -> None:
    """Print a result as a report, or as JSON on one line. On a terminal, rich draws the report."""
    if output.json:
        print(json.dumps(render(result, "json")), flush=True)
    elif _shows_unicode(sys.stdout):
        _draw(render(result, "terminal"))
    else:
        print(render(result, "text"), flush=True)


def _shows_unicode(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows Unicode."""
    letters_only = os.environ.get("TERM", "") in ("dumb", "unknown")
    return stream.isatty() and not letters_only and (stream.encoding or "").lower().startswith("utf")


def _draw(report: object) -> None:
    """Draw a report with rich. rich honours NO_COLOR (https://no-color.org) and the terminal's width."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDEST)
    console.print(report)


@contextmanager
def emit_before_raising(write: Callable[[Any], None]) -> Iterator[None]:
    """Write the result of an UnsavedError before the error leaves the context."""
    try:
        yield
    except UnsavedError as error:
        write(error.result)
        raise


@contextmanager
def progress(elsewhere: OnProgress = lambda line: None) -> Iterator[OnProgress]:
    """Redirect standard output to standard error, and yield a function that shows a line of progress.

    On a terminal each line replaces the previous line, and the last line is erased at the end; otherwise
    `elsewhere` is called with each line.
    """
    with redirect_stdout(sys.stderr):
        if sys.stderr.isatty():
            with _status_line() as show:
                yield show
        else:
            yield elsewhere


def warn(line: str) -> None:
    """Print a warning on standard error, over the current line of progress."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""  # which erases the line
    print(f"{start}planner: {printable(shortened(' '.join(line.split())))}", file=sys.stderr)


def print_progress(line: str) -> None:
    """Print a line of progress on standard error."""
    print(f"planner: {printable(line)}", file=sys.stderr, flush=True)


@contextmanager
def _status_line() -> Iterator[OnProgress]:
    progress = _Progress()
    done = Event()

    def tick() -> None:
        while not done.wait(1):
            progress.show()

    ticking = Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield progress.show_line
    finally:
        done.set()
        ticking.join()
        progress.wipe()


class _Progress:
    """A line of progress on a terminal. The time is added once the line has been shown for two seconds."""

    def __init__(self) -> None:
        self._line, self._width, self._since = "", 0, monotonic()
        self._lock = Lock()

    def show_line(self, line: str) -> None:
        """Replace the current line by a new line."""
        self._line, self._since = printable(line), monotonic()
        self.show()

    def show(self) -> None:
        """Show the current line with its time."""
        if self._line:
            self._write(progress_line(self._line, monotonic() - self._since))

    def wipe(self) -> None:
        """Erase the line."""
        if self._line:
            self._write("")
            print("\r", end="", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        with self._lock:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)


def progress_line(line: str, seconds: float) -> str:
    """Return a line of progress, followed by its time unless that is below `SILENT_SECONDS`."""
    return f"{line}, {seconds:.0f} s" if seconds >= SILENT_SECONDS else line
