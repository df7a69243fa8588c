"""Nouns of a report, without any layout: `plain`, `terminal` and the page decide how they look.

A document is a sequence of sections, a section one of blocks that belong together.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Self, TypeVar, cast

from msgspec import Struct

from planner._support.printable import printable

# How much a text matters, and whether it is good news; "neutral" is an answer that is neither yes nor no.
Style = Literal["", "strong", "faint", "neutral", "good", "warning", "bad"]


class Cell(Struct, frozen=True):
    """One field of a table."""

    text: str
    style: Style = ""
    detail: str = ""  # in a line below, fainter
    colour: str = ""  # of a mark before the text, or of the bar: #rrggbb
    share: float | None = None  # of a whole: drawn as a bar in place of the text


class Column(Struct, frozen=True):
    """A column by its heading; on a narrow terminal the one of rank 1 is left out first, rank 0 never."""

    title: str = ""
    is_number: bool = False
    min_width: int = 0  # in characters, so that tables below each other align
    rank: int = 0
    name: str = ""  # in the line that names the columns left out, by default the title
    is_bar: bool = False  # drawn on terminals only


class Table(Struct, frozen=True):
    """Rows of cells under columns; plain text indents the rows under the heading."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]
    indent: int = 2

    def cells(self) -> list[list[Cell]]:
        """Return the rows, each text as a cell."""
        return [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]


class Entry(Struct, frozen=True):
    """A line such as `Job: ...`."""

    name: str
    text: str


class Headline(Struct, frozen=True):
    """The answer, with what belongs to it."""

    lines: Sequence[str | Entry]
    style: Style


class Bullets(Struct, frozen=True):
    """Sentences under a title, fainter than figures; without a sentence there is no title either."""

    title: str
    sentences: Sequence[str]


class Paragraph(Struct, frozen=True):
    """A text that wraps."""

    text: str
    style: Style = ""


class Verbatim(Struct, frozen=True):
    """Lines that stand as they are."""

    lines: Sequence[str]


T = TypeVar("T")


def printable_parts(part: T) -> T:
    """Return a document, or a part of one, whose texts hold no character that a terminal obeys."""
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
    """A whole report."""

    sections: Sequence[Sequence[Block]]

    @classmethod
    def of(cls, *sections: Iterable[Block]) -> Self:
        """Return a document of the sections that are not empty."""
        return cls([section for section in map(list, sections) if section])
