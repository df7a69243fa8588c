"""The line of progress beside a command that prints on the same terminal."""

import fcntl
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from planner.cli.bottom_line import BottomLine


class Terminal:
    """Both ends of a terminal of a few lines."""

    def __init__(self, rows: int, columns: int) -> None:
        self._screen, program = os.openpty()
        self.stream: TextIO = os.fdopen(program, "w")
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        """Make the window larger or smaller."""
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> str:
        """Return what was written since the last call."""
        return os.read(self._screen, 10_000).decode()

    def close(self) -> None:
        """Close both ends."""
        self.stream.close()
        os.close(self._screen)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """Return a terminal of 10 lines of 30 characters."""
    made = Terminal(10, 30)
    yield made
    made.close()


FIRST = "\x1bD\x1b[1A\x1b7\x1b[1;9r\x1b8"  # room for one line, and nine that scroll


def test_the_line_stands_below_what_scrolls(terminal: Terminal) -> None:
    """The cursor goes back to where the command had it."""
    line = BottomLine(terminal.stream)
    line.show("step 1")
    assert terminal.read() == f"{FIRST}\x1b7\x1b[10;1H\x1b[2Kplanner: step 1\x1b8"
    line.show("step 2")
    assert terminal.read() == "\x1b7\x1b[10;1H\x1b[2Kplanner: step 2\x1b8"


def test_a_long_line_is_cut(terminal: Terminal) -> None:
    """A line that wraps would move what is above it."""
    BottomLine(terminal.stream).show("x" * 50)
    assert terminal.read().endswith(f"planner: {'x' * 20}\x1b8")


def test_another_size_of_the_terminal_moves_the_line(terminal: Terminal) -> None:
    """The lines that scroll are those of the new size."""
    line = BottomLine(terminal.stream)
    line.show("step 1")
    terminal.read()
    terminal.resize(20, 30)
    line.show("step 2")
    assert terminal.read() == "\x1bD\x1b[1A\x1b7\x1b[1;19r\x1b8\x1b7\x1b[20;1H\x1b[2Kplanner: step 2\x1b8"


def test_a_terminal_of_few_lines_is_left_alone(terminal: Terminal) -> None:
    """A terminal of three lines shows the command's output alone."""
    terminal.resize(3, 30)
    BottomLine(terminal.stream).show("step 1")
    terminal.stream.write("end")
    terminal.stream.flush()
    assert terminal.read() == "end"


def test_the_line_is_given_back_at_the_end(terminal: Terminal) -> None:
    """All lines scroll again, and only those that were taken are touched."""
    line = BottomLine(terminal.stream)
    line.show("step 1")
    terminal.read()
    line.close()
    assert terminal.read() == "\x1b7\x1b[r\x1b[10;1H\x1b[2K\x1b8"
    line.close()
    terminal.stream.write("end")
    terminal.stream.flush()
    assert terminal.read() == "end"


def test_each_line_is_printed_where_there_is_no_terminal() -> None:
    """A log gets a line each ten seconds."""
    code = (
        "from planner.cli.bottom_line import live_progress as live\nwith live() as (t, s): t('a'); t(str(s))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "planner: a\nplanner: 10.0\n"
