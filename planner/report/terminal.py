"""What reports on a terminal are made of: panels, tables and bars of rich, in the words of the text reports.

Imported on a terminal alone: a pipe gets the text, and no import of rich.
Nothing that the text says is left out.
"""

import re
from collections.abc import Iterable

from rich import box
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from planner.program import Outcome
from planner.report.layout import DIGITS, NAMES, Row
from planner.report.terminal_table import Column, NarrowingTable
from planner.report.units import mib

BAR = 24  # columns
TONES = {
    Outcome.FITS: "green",
    Outcome.FITS_WITH_RETRIES: "yellow",
    Outcome.DOES_NOT_FIT: "red",
}
_LABEL = re.compile(r"(\w[\w ]{0,14}): +(.*)")


def entries(lines: Iterable[str]) -> list[str]:
    """Wrapped lines put together again, each entry in one line: the terminal wraps at its own width."""
    found: list[str] = []
    for line in lines:
        if line.startswith(" ") and found:
            found[-1] += f" {line.strip()}"
        else:
            found.append(" ".join(line.split()))
    return found


def headline(lines: Iterable[str], tone: str) -> RenderableType:
    """The answer in a frame, with what belongs to it under it."""
    first, *rest = entries(lines)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    said: list[RenderableType] = [Text(first, style=f"bold {tone}")]
    for line in rest:
        found = _LABEL.fullmatch(line)
        grid.add_row(*(found.groups() if found else ("", line)))
    if rest:
        said.append(grid)
    return Panel(Group(*said), border_style=tone, box=box.ROUNDED, padding=(0, 1))


def open_table(title: str, *columns: str) -> Table:
    """A table with its title over its first column; columns whose names end in `>` stand to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column(title, overflow="fold")
    for name in columns:
        is_number = name.endswith(">")
        if is_number:
            table.add_column(name.rstrip(">"), justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def memory_table(title: str, rows: Iterable[Row]) -> NarrowingTable:
    """Rows of a name, MiB and a remark."""
    columns = (Column(title, is_number=False, wide=NAMES), Column("MiB"), Column("", is_number=False))
    return NarrowingTable(
        columns,
        [
            [name, Text(mib_text(size_bytes), style="bold"), Text(remark, style="dim")]
            for name, size_bytes, remark in rows
        ],
    )


def bar(share: float, colour: str, width: int = BAR) -> Bar:
    """A part of a whole; at most all of it."""
    return Bar(1, 0, min(1.0, max(0.0, share)), width=width, color=colour, bgcolor="default")


def bullets(title: str, sentences: Iterable[str]) -> RenderableType:
    """Sentences under a title, fainter than figures."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")
    for sentence in sentences:
        grid.add_row("•", sentence)
    parts: list[RenderableType] = [Text(title, style="bold")] if title else []
    return Group(*parts, Padding(grid, (0, 0, 0, 1), style="dim"))


def faint(line: str) -> Text:
    """A line that matters least."""
    return Text(line, style="dim")


def stacked(parts: Iterable[RenderableType | None]) -> RenderableType:
    """The parts that are there below each other, with a line between them."""
    there = [part for part in parts if part is not None]
    return Group(*[line for part in there for line in (part, Text())][:-1])


def mib_text(size_bytes: int) -> str:
    """As in the text reports."""
    return f"{mib(size_bytes, DIGITS):,.1f}"
