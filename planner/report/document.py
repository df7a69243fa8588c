"""Nouns of a report, without any layout: `plain`, `terminal` and the page decide how they look.

A document is a sequence of sections, a section one of blocks that belong together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

# How much a text matters, and whether it is good news; "neutral" is an answer that is neither yes nor no.
Style = Literal["", "strong", "faint", "neutral", "good", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of a table."""

    text: str
    style: Style = ""
    detail: str = ""  # in a line below, fainter
    colour: str = ""  # of a mark before the text, or of the bar: #rrggbb
    share: float | None = None  # of a whole: drawn as a bar in place of the text


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its heading; on a narrow terminal the one of rank 1 is left out first, rank 0 never."""

    title: str = ""
    is_number: bool = False
    min_width: int = 0  # in characters, so that tables below each other align
    rank: int = 0
    name: str = ""  # in the line that names the columns left out, by default the title
    is_bar: bool = False  # drawn on terminals only


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns; plain text indents the rows under the heading."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]
    indent: int = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """A line such as `Job: ...`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer, with what belongs to it."""

    lines: Sequence[str | Entry]
    style: Style


@dataclass(frozen=True, slots=True)
class Bullets:
    """Sentences under a title, fainter than figures; without a sentence there is no title either."""

    title: str
    sentences: Sequence[str]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text that wraps."""

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Lines that stand as they are."""

    lines: Sequence[str]


Block = Headline | Entry | Table | Bullets | Paragraph | Verbatim


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    sections: Sequence[Sequence[Block]]

    @classmethod
    def of(cls, *sections: Iterable[Block]) -> Self:
        """Return a document of the sections that are not empty."""
        return cls([section for section in map(list, sections) if section])
