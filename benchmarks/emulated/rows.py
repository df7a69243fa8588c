"""The rows of campaigns in CSV files, which several processes may add to."""

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.rows import Dataclass, read_rows, write_rows
from planner.errors import PlannerError

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


class Numbered(Dataclass, Protocol):
    """A row of a campaign."""

    @property
    def number(self) -> int:
        """Return the number of the drawn job."""
        ...


AnyNumbered = TypeVar("AnyNumbered", bound=Numbered)


def add_row(path: Path, row: Numbered) -> None:
    """Add a row, or put it in the place of the one with its number."""
    kind = type(row)
    with _locked(path):
        rows = {one.number: one for one in read_rows(path, kind)} | {row.number: row}
        write_rows(path, kind, (one for _, one in sorted(rows.items())))


def add_missing_rows(
    path: Path, kind: type[AnyNumbered], numbers: Iterable[int], compare: Callable[[int], AnyNumbered]
) -> None:
    """Add the rows of those jobs that have none yet, and print each row, or why a job has no plan."""
    for number in numbers:
        if number in {row.number for row in read_rows(path, kind)}:
            continue
        try:
            row = compare(number)
        except PlannerError as error:  # such as a size that a model does not take
            print(f"{number}: {error}", flush=True)
            continue
        add_row(path, row)
        print(row, flush=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from adding rows at the same time; the lock ends with its process."""
    with path.with_suffix(".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
