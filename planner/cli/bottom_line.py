"""Show progress on the last line of a terminal.

A command's output scrolls above the line.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from planner.cli.output import print_progress
from planner.program import OnProgress

_LEAST_ROWS = 4  # a terminal with fewer rows shows no line of progress
# Codes of a VT100: down and up by a line in the same column, the cursor's position, the lines that scroll.
_MAKE_ROOM, _SAVE, _RESTORE, _ERASE = "\x1bD\x1b[1A", "\x1b7", "\x1b8", "\x1b[2K"


@contextmanager
def live_progress() -> Iterator[tuple[OnProgress, float]]:
    """Yield a function that shows progress, and the seconds to wait between its calls.

    On a terminal the line is at the bottom and is replaced; elsewhere each line is printed.
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
    """The last line of a terminal, reserved for progress while the lines above it scroll."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows = 0  # rows of the terminal when the line was reserved, or 0 if it is not reserved

    def show(self, line: str) -> None:
        """Replace the text of the line without moving the cursor.

        Does nothing if the terminal has few rows.
        """
        size = os.get_terminal_size(self._stream.fileno())
        if size.lines < _LEAST_ROWS:
            return
        take = "" if size.lines == self._rows else self._take(size.lines)
        text = f"planner: {line}"[: size.columns - 1]
        self._write(f"{take}{_SAVE}\x1b[{size.lines};1H{_ERASE}{text}{_RESTORE}")

    def close(self) -> None:
        """Clear the line and let the whole terminal scroll again."""
        if self._rows:
            self._write(f"{_SAVE}\x1b[r\x1b[{self._rows};1H{_ERASE}{_RESTORE}")
            self._rows = 0

    def _take(self, rows: int) -> str:
        self._rows = rows
        return f"{_MAKE_ROOM}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
