"""Progress beside a command that prints on the same terminal: the last line, outside of what scrolls."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from planner.cli.output import print_progress
from planner.program import OnProgress

_LEAST_ROWS = 4  # a lower terminal is left to the command
# Of a VT100: down and up by a line at the same column, the cursor's place, the lines that scroll.
_MAKE_ROOM, _SAVE, _RESTORE, _ERASE = "\x1bD\x1b[1A", "\x1b7", "\x1b8", "\x1b[2K"


@contextmanager
def live_progress() -> Iterator[tuple[OnProgress, float]]:
    """Return a function that shows one line of progress, and how many seconds apart it is to be called.

    On a terminal the line stands at the bottom and is replaced; elsewhere each is printed.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield print_progress, 10.0
        return
    line = BottomLine(sys.stderr)
    try:
        yield line.show, 1.0
    finally:
        line.close()


class BottomLine:
    """The last line of a terminal, on which nothing else is written while the lines above it scroll."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows = 0  # of the terminal when the line was taken; 0 before

    def show(self, line: str) -> None:
        """Replace the line; the command's cursor stays where it is."""
        size = os.get_terminal_size(self._stream.fileno())
        if size.lines < _LEAST_ROWS:
            return
        take = "" if size.lines == self._rows else self._take(size.lines)
        text = f"planner: {line}"[: size.columns - 1]
        self._write(f"{take}{_SAVE}\x1b[{size.lines};1H{_ERASE}{text}{_RESTORE}")

    def close(self) -> None:
        """Give the line back, empty."""
        if self._rows:
            self._write(f"{_SAVE}\x1b[r\x1b[{self._rows};1H{_ERASE}{_RESTORE}")
            self._rows = 0

    def _take(self, rows: int) -> str:
        self._rows = rows
        return f"{_MAKE_ROOM}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
