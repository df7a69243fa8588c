"""The rows of campaigns in CSV files, which several processes may add to."""

import csv
import fcntl
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from planner._support.atomic_write import write_bytes

IDENTICAL = "identical"
ALLOCATOR = "allocator: where blocks are put"
STATIC_FAILS = "not planned"
EMULATED_FAILS = "not emulated"


@dataclass(frozen=True, slots=True)
class Row:
    """One job on both sides, in bytes."""

    number: int
    model: str
    batch: int
    gpu: str
    options: str
    versions: str
    emulated_allocated: int
    emulated_reserved: int
    emulated_oom: bool
    emulated_retries: int
    planned_allocated: int
    planned_reserved: int
    planned_oom: bool
    planned_retries: int
    cause: str  # of the first event that differs; IDENTICAL if peaks and events are the same
    place: str
    what: str
    causes: str  # of all differences of the events, with their counts
    allocator: str  # where the simulator leaves the recorded history; "" where it follows to the end
    failure: str
    seconds: float
    convolutions: str = ""  # the source of their workspaces on the static side; "" without any, or if unknown

    @property
    def ran_on_both_sides(self) -> bool:
        """True if both sides have peaks."""
        return not self.failure

    @property
    def allocated_is_same(self) -> bool:
        """True if both sides have the same peak of tensors and workspaces."""
        return not self.failure and self.emulated_allocated == self.planned_allocated

    @property
    def reserved_is_same(self) -> bool:
        """True if both sides have the same reserved memory."""
        return not self.failure and self.emulated_reserved == self.planned_reserved

    @property
    def error(self) -> float:
        """Return the larger relative error of planned over emulated peaks."""
        return max(
            abs(self.planned_allocated / max(self.emulated_allocated, 1) - 1),
            abs(self.planned_reserved / max(self.emulated_reserved, 1) - 1),
        )


class Numbered(Protocol):
    """A row of a campaign: a dataclass of numbers and words."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def number(self) -> int:
        """Return the number of the drawn job."""
        ...


AnyRow = TypeVar("AnyRow", bound=Numbered)


def read_rows(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """Read all rows, by their number; none if there is no file yet."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(line, kind) for line in csv.DictReader(file)]


def add_row(path: Path, row: Numbered) -> None:
    """Add a row, or put it in the place of the one with its number."""
    kind = type(row)
    with _locked(path):
        rows = {one.number: one for one in read_rows(path, kind)} | {row.number: row}
        out = io.StringIO()
        writer = csv.DictWriter(out, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        for _, one in sorted(rows.items()):
            writer.writerow(asdict(one))
        write_bytes(path, out.getvalue().encode())


def _row(line: dict[str, str], kind: type[AnyRow]) -> AnyRow:
    read = {"int": int, "float": float, "bool": lambda text: text == "True", "str": str}
    values: dict[str, Any] = {}
    for field in fields(kind):
        name = field.type if isinstance(field.type, str) else field.type.__name__
        if field.name in line:  # an older table has fewer columns
            values[field.name] = read[name](line[field.name])
    return kind(**values)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from adding rows at the same time; the lock ends with its process."""
    with path.with_suffix(".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
