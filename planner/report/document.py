"""The elements of a report, without layout.

`plain`, `terminal` and the page render them. A document is a sequence of sections, and a section a sequence
of blocks that belong together.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Self, TypeVar, cast

from msgspec import Struct

from planner._support.printable import printable

# The importance of a text, and whether it is good news; "neutral" is an answer that is neither yes nor no.
Style = Literal["", "strong", "faint", "neutral", "good", "warning", "bad"]


class Cell(Struct, frozen=True):
    """A table cell with text, or with a bar if `share` is not None."""

    text: str
    style: Style = ""
    detail: str = ""  # text that is shown fainter, on the line below
    colour: str = ""  # colour of a mark before the text, or of the bar, as #rrggbb; empty for no mark
    share: float | None = None  # share of a whole, drawn as a bar instead of the text; None for a text


class Column(Struct, frozen=True):
    """A column of a table; narrow terminals leave out columns by ascending rank, but never rank 0."""

    title: str = ""
    is_number: bool = False
    min_width: int = 0  # in characters, so that consecutive tables align
    rank: int = 0
    name: str = ""  # name in the line that lists the columns left out; empty if it is the title
    is_bar: bool = False  # drawn on terminals only


class Table(Struct, frozen=True):
    """A table with a title for each column, and rows of cells.

    Plain text indents the rows by `indent` characters under the heading.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]
    indent: int = 2

    def cells(self) -> list[list[Cell]]:
        """Return the rows, each `str` converted to a `Cell`."""
        return [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]


class Entry(Struct, frozen=True):
    """A line with a name, such as `Job: ...`."""

    name: str
    text: str


Lines = list[str | Entry]


class Headline(Struct, frozen=True):
    """The main result of a report, as one or more lines."""

    lines: Sequence[str | Entry]
    style: Style


class Bullets(Struct, frozen=True):
    """A list of sentences under a title, shown faintly. An empty title takes no line."""

    title: str
    sentences: Sequence[str]


class Paragraph(Struct, frozen=True):
    """A text that is wrapped to the width of the output."""

    text: str
    style: Style = ""


class Verbatim(Struct, frozen=True):
    """Lines that are shown unchanged."""

    lines: Sequence[str]


T = TypeVar("T")


def printable_parts(part: T) -> T:
    """Return a copy of a document or of one of its parts, with control characters escaped."""
    if isinstance(part, str):
        return cast(T, printable(part))
    if isinstance(part, Struct):
        fields = {name: printable_parts(getattr(part, name)) for name in part.__struct_fields__}
        return type(part)(**fields)
    if isinstance(part, list | tuple):
        return cast(T, [printable_parts(one) for one in part])
    return part


Block = Headline | Entry | Table | Bullets | Paragraph | Verbatim


class Document(Struct, frozen=True):
    """A whole report, as a sequence of sections."""

    sections: Sequence[Sequence[Block]]

    @classmethod
    def of(cls, *sections: Iterable[Block]) -> Self:
        """Return a document of the sections that are not empty."""
        return cls([section for section in map(list, sections) if section])
