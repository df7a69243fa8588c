"""A table of a terminal that leaves out its least important columns where they do not fit, and names them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

ROOMY = 72  # columns of a terminal
_ANY_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its heading; the first one to go has rank 1, and rank 0 stays."""

    title: str
    rank: int = 0
    name: str = ""  # in the line that names the columns left out, by default the heading; a picture has none
    is_number: bool = True
    wide: int = 0  # at least so many columns of the terminal, where that is roomy, so that tables align


@dataclass(frozen=True, slots=True)
class NarrowingTable:
    """Rows under columns, none of which is cut short while there is another one to leave out."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[RenderableType]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(range(len(self.columns)))
        leaving = sorted((place for place in shown if self.columns[place].rank), key=self._rank)
        while leaving and self._width(console, options, shown) > options.max_width:
            shown.remove(leaving.pop(0))
        table = self._table(shown)
        for place, drawn in zip(shown, table.columns, strict=True):
            if options.max_width >= ROOMY and self.columns[place].wide:
                drawn.min_width = self.columns[place].wide
        yield table
        names = [
            column.name or column.title for place, column in enumerate(self.columns) if place not in shown
        ]
        if any(names):
            left_out = ", ".join(name for name in names if name)
            yield Text(f"Left out in {options.max_width} columns: {left_out}", style="dim")

    def _rank(self, place: int) -> int:
        return self.columns[place].rank

    def _width(self, console: Console, options: ConsoleOptions, shown: Sequence[int]) -> int:
        return console.measure(self._table(shown), options=options.update(max_width=_ANY_WIDTH)).maximum

    def _table(self, shown: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        for place in shown:
            column = self.columns[place]
            if column.is_number:
                table.add_column(column.title, justify="right", no_wrap=True)
            else:
                table.add_column(column.title, overflow="fold", no_wrap=column.rank > 0)
        for row in self.rows:
            table.add_row(*(row[place] for place in shown))
        return table
