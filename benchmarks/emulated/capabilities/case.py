"""Cases of a capability: one job for the static planner, and how the emulated side runs it."""

from typing import NamedTuple

from benchmarks.emulated.jobs import DrawnJob


class Case(NamedTuple):
    """One job on both sides."""

    job: DrawnJob  # its number is the row's
    command: tuple[str, ...] = ()  # arguments of the emulated side's Python; (): the planner's own loop
    stop_after: int = 3  # optimizer steps of the command; 0: it takes none and ends by itself
    ranks: int = 1  # GPUs of the command
    rank: int = 0  # which of them is compared


class Capability(NamedTuple):
    """The cases of a capability; `NAME.csv` in this folder has their rows."""

    about: str  # one sentence for the page
    cases: tuple[Case, ...]
    causes: dict[int, str] = {}  # of rows outside the bars, by number
