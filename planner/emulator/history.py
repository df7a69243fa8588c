"""The allocator's history of an emulated process, and the trace that it makes."""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from planner.errors import DataFileError
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace


class HistoryEvent(NamedTuple):
    """One thing that torch's allocator did."""

    action: str  # a: handed out, r: given back, c: free again, o: out of memory
    address: int
    size_bytes: int  # requested
    stream: int
    site: int  # index into `History.sites`; -1: not told


class StepEnd(NamedTuple):
    """The end of an optimizer step."""

    allocated: int  # blocks handed out before it
    freed: int  # blocks given back before it
    step: int


class CourseMark(NamedTuple):
    """A phase or a module begins."""

    place: int  # blocks handed out and blocks given back before it, added up
    phase: Phase
    module: str  # qualified name; "" outside of modules


class Holder(NamedTuple):
    """A tensor that is told by its memory."""

    address: int
    category: Category
    module: str


@dataclass(frozen=True, slots=True)
class Course:
    """The phases and modules of a script while the allocator works."""

    marks: tuple[CourseMark, ...]
    held: tuple[tuple[int, tuple[Holder, ...]], ...]  # place, what is held there
    missing: tuple[str, ...] = ()  # what is not told
    cublas_workspace: str = ""  # CUBLAS_WORKSPACE_CONFIG


class History(Struct, frozen=True):
    """All that torch's allocator did for one process on one GPU."""

    rank: int
    device: int
    alloc_conf: str  # PYTORCH_ALLOC_CONF
    fraction: float  # of the GPU's memory, as `set_per_process_memory_fraction` sets it
    is_whole: bool  # it begins with the process
    events: tuple[HistoryEvent, ...]
    sites: tuple[Site, ...]
    step_ends: tuple[StepEnd, ...]
    pid: int = 0
    course: Course | None = None  # where it was asked for


class _CourseRow(msgspec.Struct):
    marks: tuple[CourseMark, ...]
    tables: tuple[tuple[Holder, ...], ...]
    held: tuple[tuple[int, int], ...]  # place, index into `tables`
    missing: tuple[str, ...]
    cublas_workspace: str


class _HistoryRow(msgspec.Struct):
    device: int
    alloc_conf: str
    fraction: float
    is_whole: bool
    events: tuple[HistoryEvent, ...]
    sites: tuple[tuple[str, str], ...]
    marks: tuple[StepEnd, ...]
    course: _CourseRow | None


def read_histories(folder: Path) -> tuple[History, ...]:
    """Read the histories in a folder, by rank and GPU. Raises DataFileError for one that is broken."""
    histories: list[History] = []
    for path in sorted(folder.glob("*.history")):
        rank, pid = map(int, path.stem.split("-"))
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=list[_HistoryRow])
            histories += [_history(rank, pid, row) for row in rows]
        except (OSError, ValueError, LookupError) as error:
            raise DataFileError(f"{path}: not a history of an emulated run; run the command again") from error
    return tuple(sorted(histories, key=lambda one: (one.rank, one.device)))


def _history(rank: int, pid: int, row: _HistoryRow) -> History:
    course = None
    if row.course is not None:
        held = tuple((place, row.course.tables[index]) for place, index in row.course.held)
        course = Course(row.course.marks, held, row.course.missing, row.course.cublas_workspace)
    sites = tuple(Site(*site) for site in row.sites)
    settings = (row.device, row.alloc_conf, row.fraction, row.is_whole)
    return History(rank, *settings, row.events, sites, row.marks, pid, course)


def trace_of(history: History, batch: int, scratch_depth: int = 0) -> Trace:
    """Return the trace of a history that was recorded at a batch size.

    Blocks that are given back before another one is handed out are scratch, with the category WORKSPACE;
    with a `scratch_depth` of 1 also those in whose life only such blocks are handed out, and so on. Blocks
    that are given back in a row are told by birth, since their order, which means nothing to the allocator,
    may be chance: autocast's cache is emptied by address. Raises ValueError where the history does not begin
    with the process.
    """
    if not history.is_whole:
        raise ValueError("the allocator's history does not begin with the process")
    first, marks = _phase_marks(history)
    events: list[Event] = [first]
    live: dict[int, int] = {}
    row: list[int] = []  # blocks that are given back in a row
    deaths: dict[int, int] = {}  # by block: how many blocks are born before it dies
    allocated = freed = 0

    def close_row() -> None:
        deaths.update(dict.fromkeys(row, allocated))
        events.extend(Free(block) for block in sorted(row))
        row.clear()

    for event in history.events:
        while marks and event.action in "ar" and marks[0][0] <= allocated + freed:
            close_row()
            events.append(marks.popleft()[1])
        if event.action == "a":
            close_row()
            live[event.address] = allocated
            events.append(Alloc(allocated, event.size_bytes, Category.TEMPORARY, event.site))
            allocated += 1
        elif event.action == "c":
            if event.address not in live:
                raise ValueError("a block is given back that was not handed out")
            row.append(live.pop(event.address))
        freed += event.action == "r"
    close_row()
    scratch = _scratch(allocated, deaths, scratch_depth)
    named = (
        msgspec.structs.replace(event, category=Category.WORKSPACE)
        if isinstance(event, Alloc) and event.block in scratch
        else event
        for event in events
    )
    return Trace(_with_end(tuple(named)), history.sites, batch)


def _phase_marks(history: History) -> tuple[PhaseStart, deque[tuple[int, PhaseStart]]]:
    """Return the phase in which a history begins, and where others do; without a course each step is one."""
    ends = [(end.allocated + end.freed, end.step) for end in history.step_ends]
    if history.course is None:
        return PhaseStart(1, Phase.FORWARD), deque(
            (place, PhaseStart(step + 1, Phase.FORWARD)) for place, step in ends
        )
    places = [place for place, _ in ends]
    marks: deque[tuple[int, PhaseStart]] = deque()
    last = PhaseStart(0, Phase.SETUP)
    for mark in history.course.marks:
        step = 1 + bisect_right(places, mark.place)
        now = PhaseStart(0 if mark.phase is Phase.SETUP else step, mark.phase)
        if now != last:
            marks.append((mark.place, now))
        last = now
    return PhaseStart(0, Phase.SETUP), marks


def _with_end(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return the events with the end of the loop where a script asks for nothing after its last step."""
    at, mark = next(
        (i, event) for i, event in reversed(list(enumerate(events))) if isinstance(event, PhaseStart)
    )
    follows = any(isinstance(event, Alloc) for event in events[at:])
    if mark.phase is not Phase.INPUTS or follows:
        return events
    return (*events[:at], PhaseStart(mark.step - 1, Phase.END), *events[at + 1 :])


def _scratch(births: int, deaths: Mapping[int, int], most: int) -> set[int]:
    """Return the blocks in whose life only scratch is born, nested at most so deep."""
    depths: dict[int, int] = {}
    for block in range(births - 1, -1, -1):
        depth = 0
        for inner in range(block + 1, deaths.get(block, births + 1)):
            depth = max(depth, 1 + depths.get(inner, most))
            if depth > most:
                break
        if block in deaths and depth <= most:
            depths[block] = depth
    return set(depths)
