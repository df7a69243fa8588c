"""Both sides of a comparison as rows of births: a trace, and what the allocator of a GPU recorded.

A birth knows its size and how many births came before its death, which is all that an alignment needs.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import AllocatorConfig, MemoryLimits
from planner.allocator.history.lcs import Pair
from planner.program import Alloc, Category, Free, Phase, PhaseStart, Trace


class RecordedBlock(Struct, frozen=True):
    """A block that the GPU's allocator handed out."""

    requested_bytes: int
    died: int | None  # how many blocks of the recording were born before it died; None: it did not
    where: str = ""  # what the record says of the code that asked for it


class RecordedMark(Struct, frozen=True):
    """The start of a phase of the loop in a recording."""

    births: int  # before it
    step: int
    phase: Phase


class Recording(Struct, frozen=True):
    """The record of a GPU's allocator, as far as a diff needs it."""

    about: str  # which GPU and torch, and where the record is from
    config: AllocatorConfig
    blocks: tuple[RecordedBlock, ...]  # by rising birth
    marks: tuple[RecordedMark, ...]
    peak_reserved_bytes: int | None  # None where the record tells nothing of segments
    notes: tuple[str, ...] = ()  # what is odd about the record


class Birth(Struct, frozen=True):
    """A birth of either side; the recorded ones take place and names from the traced ones."""

    requested_bytes: int
    size_bytes: int  # rounded
    died: int | None
    step: int = 0
    phase: Phase = Phase.SETUP
    module: str = ""
    op: str = ""
    category: Category | None = None
    where: str = ""


def births_of_recording(recording: Recording) -> list[Birth]:
    """Return the births of a recording, of which nothing else is known yet."""
    config = recording.config
    return [
        Birth(block.requested_bytes, config.block_bytes(block.requested_bytes), block.died, where=block.where)
        for block in recording.blocks
    ]


def births_of_trace(trace: Trace, config: AllocatorConfig) -> list[Birth]:
    """Return the births of a trace, rounded by the configuration of the recording."""
    deaths: dict[int, int] = {}
    births = 0
    for event in trace.events:
        births += isinstance(event, Alloc)
        if isinstance(event, Free):
            deaths[event.block] = births
    found = []
    mark = PhaseStart(0, Phase.SETUP)
    for event in trace.events:
        if isinstance(event, PhaseStart):
            mark = event
        elif isinstance(event, Alloc):
            size = event.size_bytes
            site = trace.sites[event.site]
            found.append(
                Birth(
                    size,
                    config.block_bytes(size),
                    deaths.get(event.block),
                    mark.step,
                    mark.phase,
                    site.module,
                    site.op,
                    event.category,
                )
            )
    return found


def marks_of_trace(trace: Trace) -> list[RecordedMark]:
    """Return where the phases of a trace begin, as a recording says it."""
    marks, births = [], 0
    for event in trace.events:
        births += isinstance(event, Alloc)
        if isinstance(event, PhaseStart):
            marks.append(RecordedMark(births, event.step, event.phase))
    return marks


def common_cuts(traced: Sequence[RecordedMark], recorded: Sequence[RecordedMark], ends: Pair) -> list[Pair]:
    """Return the births on both sides at which both know that the same phase begins, with both ends.

    A phase that begins several times in a step, as with accumulated gradients, is known by its turn.
    """
    places = _by_turn(recorded)
    cuts: list[Pair] = [(0, 0)]
    for key, births in _by_turn(traced).items():
        other = places.get(key)
        if other is not None and births >= cuts[-1][0] and other >= cuts[-1][1]:
            cuts.append((births, min(other, ends[1])))
    cuts.append(ends)
    return [cut for number, cut in enumerate(cuts) if number == 0 or cut != cuts[number - 1]]


def _by_turn(marks: Sequence[RecordedMark]) -> dict[tuple[int, Phase, int], int]:
    found: dict[tuple[int, Phase, int], int] = {}
    turns: dict[tuple[int, Phase], int] = {}
    for mark in marks:
        turn = turns[mark.step, mark.phase] = turns.get((mark.step, mark.phase), 0) + 1
        found[mark.step, mark.phase, turn] = mark.births
    return found


def lives_of(births: Sequence[Birth], matched: set[int]) -> list[int]:
    """For each birth, how many matched blocks were born before its death; those that stay outlive all."""
    before, count = [0], 0
    for index in range(len(births)):
        count += index in matched
        before.append(count)
    return [count if birth.died is None else before[birth.died] for birth in births]


class Peak(Struct, frozen=True):
    allocated_bytes: int
    reserved_bytes: int
    at: int  # the birth that reaches the allocated peak


def peak_of(births: Sequence[Birth], config: AllocatorConfig) -> Peak:
    """Return the peaks of a row of births and deaths in an allocator without end; both sides by the same
    measure.
    """
    allocator = CachingAllocator(MemoryLimits(config=replace(config, per_process_memory_fraction=1.0)))
    dying: dict[int, list[int]] = {}
    for index, birth in enumerate(births):
        if birth.died is not None:
            dying.setdefault(birth.died, []).append(index)
    blocks: dict[int, Block] = {}
    highest = at = 0
    for index, birth in enumerate(births):
        for dead in dying.get(index, ()):
            allocator.free(blocks.pop(dead))
        block = allocator.malloc(birth.requested_bytes)
        assert block is not None  # it has no end
        blocks[index] = block
        if allocator.allocated_bytes > highest:
            highest, at = allocator.allocated_bytes, index
    return Peak(highest, allocator.peak_reserved_bytes, at)
