"""Cases of a capability: one job for the static planner, and how the emulated side runs it."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.emulated.jobs import DrawnJob, options_of
from benchmarks.emulated.rows import Row
from benchmarks.rows import read_rows

HERE = Path(__file__).parent


class Case(NamedTuple):
    """One job on both sides."""

    job: DrawnJob  # its number is the row's
    command: tuple[str, ...] = ()  # arguments of the emulated side's Python; (): the planner's own loop
    stop_after: int = 3  # optimizer steps of the command; 0: it takes none and ends by itself
    ranks: int = 1  # GPUs of the command
    rank: int = 0  # which of them is compared


def jobs_of_rows(name: str) -> list[DrawnJob]:
    """Return the jobs that the rows of a table name."""
    return [
        DrawnJob(row.number, row.model, row.batch, row.gpu, options_of(row.options))
        for row in read_rows(HERE / f"{name}.csv", Row)
    ]


class Capability(NamedTuple):
    """The cases of a capability; `NAME.csv` in this folder has their rows."""

    about: str  # one sentence for the page
    cases: tuple[Case, ...]
    causes: dict[int, str] = {}  # of rows outside the bars, by number
