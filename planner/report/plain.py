"""Render a document as aligned plain text, wrapped at 100 columns."""

from collections.abc import Iterator
from textwrap import wrap

from planner.report.document import (
    Block,
    Bullets,
    Column,
    Document,
    Entry,
    Headline,
    Paragraph,
    Table,
    Verbatim,
)

WIDTH = 100
_LABEL = 16  # least width of an entry's name with the colon and the space after it
_GAP = "  "


def render_plain(document: Document) -> str:
    """Return a document as text, with an empty line between sections."""
    sections = (
        "\n".join(line for block in section for line in _lines(block)) for section in document.sections
    )
    return "\n\n".join(sections)


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Headline(lines):
            for line in lines:
                yield from _lines(Paragraph(line) if isinstance(line, str) else line)
        case Entry(name, text):
            yield from wrapped(f"{name + ': ':<{_LABEL}}", text)
        case Table():
            yield from _table_lines(block)
        case Bullets(title, sentences):
            yield from (title,) if title else ()
            for sentence in sentences:
                yield from wrapped("  - ", sentence)
        case Paragraph(text):
            yield from wrapped("", text)
        case Verbatim(lines):
            yield from lines


def wrapped(beginning: str, text: str) -> list[str]:
    """Return `beginning` followed by `text` as lines wrapped at `WIDTH` columns.

    Later lines are indented by the beginning's width.
    """
    lines = wrap(text, WIDTH - len(beginning), break_on_hyphens=False) or [""]
    rest = " " * len(beginning)
    return [f"{beginning}{lines[0]}".rstrip(), *(f"{rest}{line}" for line in lines[1:])]


def _table_lines(table: Table) -> Iterator[str]:
    """Yield the lines of a table as text, without its bar columns.

    They are the headings, if there are any, then each row followed by its details.
    """
    shown = [place for place, column in enumerate(table.columns) if not column.is_bar]
    columns = [table.columns[place] for place in shown]
    rows = [[row[place] for place in shown] for row in table.cells()]
    texts = [[" " * table.indent + first.text, *(cell.text for cell in rest)] for first, *rest in rows]
    headings = [column.title for column in columns]
    lines = [headings, *texts] if any(headings) else texts
    widths = [
        max(column.min_width, *map(len, cells))
        for column, cells in zip(columns, zip(*lines, strict=True), strict=True)
    ]
    for cells in lines[: len(lines) - len(texts)]:
        yield _row(columns, widths, cells)[0]
    for cells, row in zip(texts, rows, strict=True):
        yield from _row(columns, widths, cells)
        for place, cell in enumerate(row):
            if cell.detail:
                yield from wrapped(" " * sum(width + len(_GAP) for width in widths[:place]), cell.detail)


def _row(columns: list[Column], widths: list[int], cells: list[str]) -> list[str]:
    aligned = [
        f"{cell:>{width}}" if column.is_number else f"{cell:<{width}}"
        for column, width, cell in zip(columns, widths, cells, strict=True)
    ]
    if columns[-1].is_number:
        return [_GAP.join(aligned).rstrip()]
    return wrapped("".join(cell + _GAP for cell in aligned[:-1]), cells[-1])
