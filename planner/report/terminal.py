"""Render a document for terminals with rich.

Headlines are panels, and narrow terminals get fewer columns of tables. Only output to a terminal imports this
module: a pipe gets plain text without an import of rich.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from planner.report.document import (
    Block,
    Bullets,
    Cell,
    Document,
    Entry,
    Headline,
    Paragraph,
    Table,
    Verbatim,
)

BAR = 24  # width of a bar, in characters
LEAST_TABLE_WIDTH = 72  # width of the narrowest terminal on which columns have their minimum widths
_ANY_WIDTH = 10_000
_COLOURS = {
    "": "",
    "strong": "bold",
    "faint": "dim",
    "neutral": "cyan",
    "good": "green",
    "warning": "yellow",
    "bad": "red",
}


def render_terminal(document: Document) -> RenderableType:
    """Return a document as an object that rich can print. An empty line separates sections."""
    drawn: list[RenderableType] = []
    for section in document.sections:
        drawn += [Text()] if drawn else []
        drawn += map(_draw, section)
    return Group(*drawn)


def _draw(block: Block) -> RenderableType:
    match block:
        case Headline():
            return _panel(block)
        case Entry(name, text):
            return _entries([(name, text)])
        case Table():
            return NarrowingTable(block)
        case Bullets(title, sentences):
            return _bullets(title, sentences)
        case Paragraph(text, style):
            return Text(text, style=_COLOURS[style])
        case Verbatim(lines):
            return Text("\n".join(lines))


def _panel(headline: Headline) -> RenderableType:
    """Return a headline in a frame. It has the first line in bold, then other texts, then entries."""
    tone = _COLOURS[headline.style]
    first, *rest = headline.lines
    if isinstance(first, Entry):
        first = f"{first.name}: {first.text}"
    parts: list[RenderableType] = [Text(first, style=f"bold {tone}")]
    parts += [Text(line) for line in rest if isinstance(line, str)]
    if entries := [(line.name, line.text) for line in rest if isinstance(line, Entry)]:
        parts.append(_entries(entries))
    return Panel(Group(*parts), border_style=tone, box=box.ROUNDED, padding=(0, 1))


def _entries(rows: Iterable[tuple[str, str]], style: str = "dim", gap: int = 2) -> RenderableType:
    grid = RichTable.grid(padding=(0, gap))
    grid.add_column(style=style)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, text)
    return grid


def _bullets(title: str, sentences: Sequence[str]) -> RenderableType:
    grid = _entries((("•", sentence) for sentence in sentences), style="", gap=1)
    parts: list[RenderableType] = [Text(title, style="bold")] if title else []
    return Group(*parts, Padding(grid, (0, 0, 0, 1), style="dim"))


@dataclass(frozen=True, slots=True)
class NarrowingTable:
    """A table that, if too wide, leaves out its least important columns and lists their names below."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.table.columns
        shown = list(range(len(columns)))
        leaving = sorted((place for place in shown if columns[place].rank), key=lambda at: columns[at].rank)
        while leaving and self._width(console, options, shown) > options.max_width:
            shown.remove(leaving.pop(0))
        drawn = self._draw(shown)
        for place, column in zip(shown, drawn.columns, strict=True):
            if options.max_width >= LEAST_TABLE_WIDTH and drawn.show_header:
                indent = 0 if place else self.table.indent  # the indent is for plain text
                column.min_width = max(0, columns[place].min_width - indent)
        yield drawn
        names = [column.name or column.title for at, column in enumerate(columns) if at not in shown]
        if any(names):
            left_out = ", ".join(name for name in names if name)
            yield Text(f"Left out in {options.max_width} columns: {left_out}", style="dim")

    def _width(self, console: Console, options: ConsoleOptions, shown: Sequence[int]) -> int:
        return console.measure(self._draw(shown), options=options.update(max_width=_ANY_WIDTH)).maximum

    def _draw(self, shown: Sequence[int]) -> RichTable:
        columns = [self.table.columns[place] for place in shown]
        if any(column.title for column in columns):
            drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        else:
            drawn = RichTable.grid(padding=(0, 2))
        for column in columns:
            if column.is_number:
                drawn.add_column(column.title, justify="right", no_wrap=True)
            else:
                drawn.add_column(column.title, overflow="fold", no_wrap=column.rank > 0)
        for row in self.table.rows:
            drawn.add_row(*(_draw_cell(row[place]) for place in shown))
        return drawn


def _draw_cell(cell: Cell | str) -> RenderableType:
    if isinstance(cell, str):
        return cell
    if cell.share is not None:
        share = min(1.0, max(0.0, cell.share))
        return Bar(1, 0, share, width=BAR, color=cell.colour or "default", bgcolor="default")
    text = Text("▌ ", cell.colour) if cell.colour else Text()
    text.append(cell.text, style=_COLOURS[cell.style] or "default")
    return text.append(f"\n{cell.detail}", style="dim") if cell.detail else text
