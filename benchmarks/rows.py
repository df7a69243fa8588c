"""Tables of results in CSV files, a dataclass for each kind of row."""

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from planner._support.atomic_write import write_bytes


class Dataclass(Protocol):
    """A dataclass of numbers, words and flags."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


AnyRow = TypeVar("AnyRow", bound=Dataclass)


def read_rows(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """Return the rows of a table; empty if the file does not exist.

    A column that an older table lacks has the default of its field.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [msgspec.convert(line, kind, strict=False) for line in csv.DictReader(file)]


def write_rows(path: Path, kind: type[AnyRow], rows: Iterable[AnyRow]) -> None:
    """Write a table in place of the file, if it exists."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_bytes(path, out.getvalue().encode())
