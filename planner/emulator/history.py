"""The allocator's history of an emulated process, and the trace that it makes."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from planner.allocator.history import HistoryEvent, interleave, lifetimes, to_events
from planner.errors import DataFileError
from planner.program import Alloc, Category, Event, Phase, PhaseStart, Site, Trace

PLACED = ("alloc", "free_requested")  # the actions that places count


class StepEnd(NamedTuple):
    """The end of an optimizer step."""

    allocated: int  # blocks allocated before it
    freed: int  # blocks freed before it
    step: int


class CourseMark(NamedTuple):
    """A phase or a module begins."""

    place: int  # blocks allocated and blocks freed before it, added up
    phase: Phase
    module: str  # qualified name; "" outside of modules


class Holder(NamedTuple):
    """A tensor that is identified by its memory."""

    address: int
    category: Category
    module: str


class Course(Struct, frozen=True):
    """The phases and modules of a script while the allocator works."""

    marks: tuple[CourseMark, ...]
    held: tuple[tuple[int, int], ...]  # place, index into `tables`
    tables: tuple[tuple[Holder, ...], ...]
    missing: tuple[str, ...] = ()  # what is not recorded
    cublas_workspace: str = ""  # CUBLAS_WORKSPACE_CONFIG


class ProcessHistory(Struct, frozen=True):
    """All that torch's allocator did for one process on one GPU."""

    rank: int
    pid: int
    device: int
    alloc_conf: str  # PYTORCH_ALLOC_CONF
    fraction: float  # of the GPU's memory, as `set_per_process_memory_fraction` sets it
    is_whole: bool  # it begins with the process
    events: tuple[HistoryEvent, ...]
    sites: tuple[Site, ...]  # FILE:LINE of the script, function
    step_ends: tuple[StepEnd, ...]
    course: Course | None = None  # where it was allocated


def read_histories(folder: Path) -> tuple[ProcessHistory, ...]:
    """Read the histories in a folder, by rank, process and GPU. Raises DataFileError for a broken one."""
    histories: list[ProcessHistory] = []
    for path in sorted(folder.glob("*.history")):
        try:
            histories += msgspec.json.decode(path.read_bytes(), type=tuple[ProcessHistory, ...])
        except (OSError, ValueError) as error:
            raise DataFileError(f"{path}: not a history of an emulated run; run the command again") from error
    return tuple(sorted(histories, key=lambda one: (one.rank, one.pid, one.device)))


def trace_of(history: ProcessHistory, batch: int, scratch_depth: int = 0) -> Trace:
    """Return the trace of a history that was recorded at a batch size.

    Blocks that are freed before another one is allocated are scratch, with the category WORKSPACE;
    with a `scratch_depth` of 1 also those in whose life only such blocks are allocated, and so on. Raises
    ValueError if the history does not begin with the process.
    """
    if not history.is_whole:
        raise ValueError("the allocator's history does not begin with the process")
    total = sum(event.action in PLACED for event in history.events)
    marks = [mark for mark in _phase_marks(history) if mark[0] < total]
    first = PhaseStart(1, Phase.FORWARD) if history.course is None else PhaseStart(0, Phase.SETUP)
    events = [first, *to_events(interleave(history.events, marks, PLACED))]
    scratch = _scratch(events, scratch_depth)
    for index, event in enumerate(events):
        if isinstance(event, Alloc) and event.block in scratch:
            events[index] = replace(event, category=Category.WORKSPACE)
    return Trace(_with_end(events), history.sites, batch)


def _phase_marks(history: ProcessHistory) -> Iterator[tuple[int, PhaseStart]]:
    """Yield where phases begin after the first one; without a course each step is one."""
    ends = [end.allocated + end.freed for end in history.step_ends]
    if history.course is None:
        for place, end in zip(ends, history.step_ends, strict=True):
            yield place, PhaseStart(end.step + 1, Phase.FORWARD)
        return
    last = PhaseStart(0, Phase.SETUP)
    for mark in history.course.marks:
        step = 0 if mark.phase is Phase.SETUP else 1 + bisect_right(ends, mark.place)
        now = PhaseStart(step, mark.phase)
        if now != last:
            yield mark.place, now
        last = now


def _with_end(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events with the end of the loop where a script allocates nothing after its last step."""
    backwards = reversed(list(enumerate(events)))
    at, mark = next((index, event) for index, event in backwards if isinstance(event, PhaseStart))
    follows = any(isinstance(event, Alloc) for event in events[at:])
    if mark.phase is not Phase.INPUTS or follows:
        return tuple(events)
    return (*events[:at], PhaseStart(mark.step - 1, Phase.END), *events[at + 1 :])


def _scratch(events: Sequence[Event], most: int) -> set[int]:
    """Return the blocks in whose life only scratch is allocated, nested at most so deep."""
    ends = lifetimes(events)
    depths: dict[int, int] = {}
    for block in sorted(ends, reverse=True):
        depth = 0
        for inner in range(block + 1, ends[block]):
            depth = max(depth, 1 + depths.get(inner, most))
            if depth > most:
                break
        else:
            depths[block] = depth
    return set(depths)
