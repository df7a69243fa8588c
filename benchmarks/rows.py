"""Tables of results in CSV files, a dataclass for each kind of row."""

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from planner._support.atomic_write import write_bytes


class Dataclass(Protocol):
    """A dataclass of numbers, words and flags."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


AnyRow = TypeVar("AnyRow", bound=Dataclass)


def read_lines(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table as text, by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_rows(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """Return the rows of a table; empty if the file does not exist.

    A column that an older table lacks has the default of its field.
    """
    if not path.exists():
        return []
    return [msgspec.convert(line, kind, strict=False) for line in read_lines(path)]


def write_lines(path: Path, columns: Iterable[str], lines: Iterable[Iterable[object]]) -> None:
    """Write a table in place of the file, if it exists."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([columns, *lines])
    write_bytes(path, out.getvalue().encode())


def write_rows(path: Path, kind: type[AnyRow], rows: Iterable[AnyRow]) -> None:
    """Write a table of a kind of rows in place of the file, if it exists."""
    write_lines(path, [field.name for field in fields(kind)], map(astuple, rows))
