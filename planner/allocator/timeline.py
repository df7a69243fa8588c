"""A run event by event: what is allocated, for what, and reserved after each; for explanations and pictures.

`replay` answers whether a batch fits and runs a thousand times in a search; what is told here is looked at
once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.replay import Arena, after_refusal, check_batch, open_allocator
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart, Trace


@dataclass(frozen=True, slots=True)
class Timeline:
    """Levels after each event of a run, in bytes: one entry for each event that was run.

    Blocks count whole, as torch's `memory_allocated` counts them; the roles add up to `allocated_bytes`.
    """

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    by_role: Mapping[Category, tuple[int, ...]]
    marks: tuple[tuple[int, PhaseStart], ...]  # index of the event, the mark

    @property
    def peak_event(self) -> int:
        """The first event at which the most is allocated."""
        return self.allocated_bytes.index(max(self.allocated_bytes))

    @property
    def reserved_peak_event(self) -> int:
        """The first event at which the most is reserved."""
        return self.reserved_bytes.index(max(self.reserved_bytes))


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The highest levels within one phase of one step, and what is allocated at its end."""

    step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    end_allocated_bytes: int


def play(trace: Trace, batch: int, allocator: CachingAllocator) -> Iterator[tuple[int, Event, Block | None]]:
    """Run a trace; after each event comes its index, the event and the block of an `Alloc`.

    An `Alloc` without a block could not be served and is the last event. Raises ValueError where the trace
    says nothing about this batch size.
    """
    check_batch(trace, batch)
    blocks: dict[int, Block] = {}
    for index, event in enumerate(trace.events):
        block = None
        if isinstance(event, Alloc):
            block = allocator.malloc(event.bytes_at(batch))
            if block is None:
                block = after_refusal(allocator, event.optional)
            if block is None:
                yield index, event, None
                return
            blocks[event.block] = block
        elif isinstance(event, Free):
            allocator.free(blocks.pop(event.block))
        yield index, event, block


def take_timeline(trace: Trace, batch: int, arena: Arena) -> Timeline:
    """The levels after each event of a trace, up to the request that fails if one does."""
    allocator = open_allocator(arena)
    live: dict[int, tuple[Category, int]] = {}
    levels = dict.fromkeys(Category, 0)
    columns: dict[Category, list[int]] = {role: [] for role in Category}
    allocated: list[int] = []
    reserved: list[int] = []
    marks: list[tuple[int, PhaseStart]] = []
    for index, event, block in play(trace, batch, allocator):
        if isinstance(event, Alloc):
            if block is None:
                break
            live[event.block] = event.role, block.size_bytes
            levels[event.role] += block.size_bytes
        elif isinstance(event, Free):
            role, size_bytes = live.pop(event.block)
            levels[role] -= size_bytes
        else:
            marks.append((index, event))
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
        for role, column in columns.items():
            column.append(levels[role])
    by_role = {role: tuple(column) for role, column in columns.items()}
    return Timeline(tuple(allocated), tuple(reserved), by_role, tuple(marks))


def phase_peaks(timeline: Timeline) -> tuple[PhasePeak, ...]:
    """The highest levels of each phase in which something happens, in the order in which they begin first.

    What a phase finds counts. A phase that comes several times in a step, as with accumulated gradients, is
    told once.
    """
    peaks: dict[tuple[int, Phase], PhasePeak] = {}
    for start, end, mark in _stretches(timeline):
        allocated = timeline.allocated_bytes[start:end]
        reserved = max(timeline.reserved_bytes[start:end])
        key = mark.step, mark.phase
        so_far = peaks.get(key, PhasePeak(mark.step, mark.phase, 0, 0, 0))
        peaks[key] = PhasePeak(
            mark.step,
            mark.phase,
            max(so_far.allocated_bytes, *allocated),
            max(so_far.reserved_bytes, reserved),
            allocated[-1],
        )
    return tuple(peaks.values())


def _stretches(timeline: Timeline) -> Iterator[tuple[int, int, PhaseStart]]:
    """First event, end and mark of each stretch in which more than the mark happens; set-up comes first."""
    total = len(timeline.allocated_bytes)
    starts = [index for index, _ in timeline.marks]
    if not starts or starts[0] > 0:
        yield 0, starts[0] if starts else total, PhaseStart(0, Phase.SETUP)
    for (start, mark), end in zip(timeline.marks, [*starts[1:], total], strict=bool(starts)):
        if end - start > 1:
            yield start, end, mark


def thin(timeline: Timeline, most: int) -> list[int]:
    """Indices of at most about `most` events, both peaks among them: of each stretch the highest one."""
    allocated = timeline.allocated_bytes
    width = -(-len(allocated) // most)
    if width <= 1:
        return list(range(len(allocated)))
    starts = range(0, len(allocated), width)
    highest = {max(range(i, min(i + width, len(allocated))), key=lambda j: allocated[j]) for i in starts}
    kept = {timeline.peak_event, timeline.reserved_peak_event, 0, len(allocated) - 1}
    return sorted(highest | kept)
