"""Cases of a capability: one job for the static planner, and how the emulated side runs it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


def cases_of_script(
    script: str, key: str, jobs: Iterable[tuple[str, int, str, Mapping[str, Any]]]
) -> tuple[Case, ...]:
    """Return the cases of a script that makes a trainer and runs it to its end.

    A job is a function of the script, a batch size, a GPU, and arguments. The script takes all but the GPU as
    JSON, with the function under `key`.
    """
    cases = []
    for number, (function, batch, gpu, given) in enumerate(jobs, start=1):
        job = DrawnJob(number, f"{script}:{function}", batch, gpu, {"model_arg": dict(given)})
        command = ("-P", script, json.dumps({key: function, "batch": batch, **given}))
        cases.append(Case(job, command, stop_after=1000))  # it ends by itself
    return tuple(cases)


def cases_of_rows(name: str) -> dict[int, Case]:
    """Return the jobs that the rows of a capability name, by number, as cases of the planner's own loop."""
    return {
        row.number: Case(DrawnJob(row.number, row.model, row.batch, row.gpu, options_of(row.options)))
        for row in read_rows(HERE / f"{name}.csv", Row)
    }


class Capability(NamedTuple):
    """The cases of a capability; `NAME.csv` in this folder has their rows."""

    about: str  # one sentence for the page
    cases: tuple[Case, ...]
    causes: dict[int, str] = {}  # of rows outside the bars, by number
