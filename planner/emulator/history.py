"""Read the allocator histories of emulated processes, and convert them to traces."""

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

PLACED = ("alloc", "free_requested")  # a position in a history is the number of these actions before it


class StepEnd(NamedTuple):
    """The end of an optimizer step in an allocator history."""

    allocated: int  # number of blocks allocated before it
    freed: int  # number of blocks freed before it
    step: int


class ScriptMark(NamedTuple):
    """A position in an allocator history at which the phase or the running module changes."""

    place: int  # number of blocks allocated plus blocks freed before it
    phase: Phase
    module: str  # qualified name, empty outside of modules


class Holder(NamedTuple):
    """The address of a tensor's memory, with the tensor's category and module."""

    address: int
    category: Category
    module: str


class ScriptLog(Struct, frozen=True):
    """A script's phases, modules and tensors in memory, each at a position in the allocator's history."""

    marks: tuple[ScriptMark, ...]
    held: tuple[tuple[int, int], ...]  # position, index into `tables`
    tables: tuple[tuple[Holder, ...], ...]
    missing: tuple[str, ...] = ()  # parts of the control flow that are not recorded
    cublas_workspace: str = ""  # CUBLAS_WORKSPACE_CONFIG


class ProcessHistory(Struct, frozen=True):
    """The recorded actions of torch's allocator for one process on one GPU."""

    rank: int
    pid: int
    device: int
    alloc_conf: str  # PYTORCH_ALLOC_CONF
    fraction: float  # the limit of `set_per_process_memory_fraction`, as a fraction of the GPU's memory
    is_whole: bool  # whether the history begins with the process
    events: tuple[HistoryEvent, ...]
    sites: tuple[Site, ...]  # FILE:LINE of the script, function
    step_ends: tuple[StepEnd, ...]
    script_log: ScriptLog | None = None  # phases and modules of the script; None if they are not recorded


def read_histories(folder: Path) -> tuple[ProcessHistory, ...]:
    """Return the histories in a folder, sorted by rank, process and GPU.

    Raises DataFileError for a file that is no history.
    """
    histories: list[ProcessHistory] = []
    for path in sorted(folder.glob("*.history")):
        try:
            histories += msgspec.json.decode(path.read_bytes(), type=tuple[ProcessHistory, ...])
        except (OSError, ValueError) as error:
            raise DataFileError(f"{path}: not a history of an emulated run; run the command again") from error
    return tuple(sorted(histories, key=lambda one: (one.rank, one.pid, one.device)))


def trace_of(history: ProcessHistory, batch: int, scratch_depth: int = 0) -> Trace:
    """Convert an allocator history to a trace.

    The history was recorded at the batch size `batch`. A block that is freed before another block is
    allocated is scratch and gets the category WORKSPACE. With a `scratch_depth` of 1, a block is scratch too
    if only scratch blocks are allocated during its life, and so on. Raises ValueError if the history does not
    begin with the process.
    """
    if not history.is_whole:
        raise ValueError("the allocator's history does not begin with the process")
    total = sum(event.action in PLACED for event in history.events)
    marks = [mark for mark in _phase_marks(history) if mark[0] < total]
    first = PhaseStart(1, Phase.FORWARD) if history.script_log is None else PhaseStart(0, Phase.SETUP)
    events = [first, *to_events(interleave(history.events, marks, PLACED))]
    scratch = _scratch(events, scratch_depth)
    for index, event in enumerate(events):
        if isinstance(event, Alloc) and event.block in scratch:
            events[index] = replace(event, category=Category.WORKSPACE)
    return Trace(_with_end(events), history.sites, batch)


def _phase_marks(history: ProcessHistory) -> Iterator[tuple[int, PhaseStart]]:
    """Yield (position, start) for each phase after the first.

    If phases are not recorded, each step is a phase.
    """
    ends = [end.allocated + end.freed for end in history.step_ends]
    if history.script_log is None:
        for place, end in zip(ends, history.step_ends, strict=True):
            yield place, PhaseStart(end.step + 1, Phase.FORWARD)
        return
    last = PhaseStart(0, Phase.SETUP)
    for mark in history.script_log.marks:
        step = 0 if mark.phase is Phase.SETUP else 1 + bisect_right(ends, mark.place)
        now = PhaseStart(step, mark.phase)
        if now != last:
            yield mark.place, now
        last = now


def _with_end(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events with the last phase replaced by END if it is INPUTS and allocates nothing."""
    backwards = reversed(list(enumerate(events)))
    at, mark = next((index, event) for index, event in backwards if isinstance(event, PhaseStart))
    follows = any(isinstance(event, Alloc) for event in events[at:])
    if mark.phase is not Phase.INPUTS or follows:
        return tuple(events)
    return (*events[:at], PhaseStart(mark.step - 1, Phase.END), *events[at + 1 :])


def _scratch(events: Sequence[Event], most: int) -> set[int]:
    """Return the block numbers of the scratch blocks in a trace.

    A block is scratch if it is freed, and only scratch blocks are allocated during its life, nested at most
    `most` levels deep. If `most` is 0, no block may be allocated during its life.
    """
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
