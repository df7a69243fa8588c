"""Convert traces and recorded histories to sequences of allocations.

Such sequences can be aligned. An alignment needs only each allocation's size and the number of allocations
before it is freed.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from msgspec import Struct

from planner.allocator.config import MIB, AllocatorConfig, config_of_torch, parse_alloc_conf
from planner.allocator.history.history import SEGMENT_SIGNS, History, HistoryEvent
from planner.allocator.history.lcs import Pair
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart, Site

T = TypeVar("T")


class Recording(Struct, frozen=True):
    """A recorded allocator history, converted to the events of a trace."""

    about: str  # the GPU, the version of torch, and the source of the record
    config: AllocatorConfig
    events: tuple[Event, ...]
    sites: tuple[Site, ...]  # allocating code: FILE:LINE, function; an event's site is -1 if unknown
    peak_reserved_bytes: int | None  # None if unknown
    notes: tuple[str, ...] = ()  # peculiarities of the record
    peak_allocated_bytes: int | None = None  # None if the events determine it

    @property
    def steps(self) -> int | None:
        """Return the highest recorded step, at least 1, or None if no phases are recorded."""
        steps = [event.step for event in self.events if isinstance(event, PhaseStart)]
        return max(1, *steps) if steps else None


class Allocation(Struct, frozen=True):
    """An allocation of a trace or a recording: its sizes, lifetime, step, phase, site and category.

    A recorded allocation gets the site of a traced allocation.
    """

    requested_bytes: int
    size_bytes: int  # rounded
    freed: int | None  # number of allocations before it is freed; None if it is never freed
    step: int
    phase: Phase
    site: Site
    category: Category
    where: str = ""  # the code that made a recorded allocation, as the record names it


def recording_of(history: History, source: str) -> Recording:
    """Convert a history to a recording. Raises UsageError for allocator options that are not simulated."""
    config = parse_alloc_conf(history.alloc_conf, config_of_torch(history.torch))
    total = sum(event.action == "alloc" for event in history.events)
    marks = [(min(mark.allocations, total), PhaseStart(mark.step, mark.phase)) for mark in history.marks]
    events = tuple(to_events(interleave(history.events, marks, ("alloc",))))
    held = {block.address: block.size_bytes for one in history.start for block in one.blocks if block.in_use}
    frees = sum(event.action == "free_completed" for event in history.events)
    strangers = frees - sum(isinstance(event, Free) for event in events)
    unknown = 0 if history.start else strangers
    return Recording(
        f"{history.gpu}, torch {history.torch}, {source}",
        config,
        events,
        history.sites,
        _peak_reserved(history) if unknown == 0 else None,
        (*history.notes, *_notes(bool(total), unknown, bool(marks), held)),
        _peak_allocated(history.events, held, config) if history.start else None,
    )


def _peak_reserved(history: History) -> int | None:
    """Return the most bytes reserved at once, or None if the record has no segments."""
    held = sum(state.size_bytes for state in history.start)
    changes = (SEGMENT_SIGNS.get(event.action, 0) * event.size_bytes for event in history.events)
    return max(accumulate(changes, initial=held)) or None


def _peak_allocated(events: Iterable[HistoryEvent], held: Mapping[int, int], config: AllocatorConfig) -> int:
    """Return the most bytes in use at once, with the blocks `held` in use before the first event.

    `held` has the bytes of these blocks by address.
    """
    used = dict(held)
    level_bytes = peak_bytes = sum(used.values())
    for event in events:
        if event.action == "alloc" and event.size_bytes:
            size_bytes = used[event.address] = config.block_bytes(event.size_bytes)
            level_bytes += size_bytes
            peak_bytes = max(peak_bytes, level_bytes)
        elif event.action == "free_completed":
            level_bytes -= used.pop(event.address, 0)
    return peak_bytes


def _notes(has_allocations: bool, strangers: int, has_marks: bool, held: Mapping[int, int]) -> Iterator[str]:
    if not has_allocations:
        yield "the record has no allocation at all"
    if held:
        yield (
            f"the record begins with {len(held)} blocks of {sum(held.values()) / MIB:.1f} MiB in use, which "
            "count in its peaks and are aligned with nothing"
        )
    if strangers:
        yield (
            f"{strangers} blocks die that were born before the recording began, or whose birth torch had "
            "dropped: record from before the first tensor, with more entries"
        )
    if not has_marks:
        yield "the record does not mark where phases begin, so that it is aligned as one row"


def interleave(
    events: Iterable[HistoryEvent], notes: Iterable[tuple[int, T]], counted: Collection[str]
) -> Iterator[HistoryEvent | T]:
    """Yield the events with notes inserted at their positions.

    The position of a note is the number of events before it whose action is in `counted`. Notes whose
    position is after the last event are left out.
    """
    waiting = deque(notes)
    place = 0
    for event in events:
        if event.action in counted:
            while waiting and waiting[0][0] <= place:
                yield waiting.popleft()[1]
            place += 1
        yield event
    while waiting and waiting[0][0] <= place:
        yield waiting.popleft()[1]


def to_events(recorded: Iterable[HistoryEvent | PhaseStart]) -> Iterator[Event]:
    """Convert recorded events to events of a trace.

    Blocks are numbered in order of allocation. Requests of zero bytes, and frees of blocks whose allocation
    is not recorded, are left out. Blocks that are freed consecutively are sorted by number: their order,
    which does not affect the allocator, may be arbitrary, as when autocast's cache is emptied by address.
    """
    live: dict[int, int] = {}
    freed: list[int] = []
    count = 0
    for item in recorded:
        if isinstance(item, PhaseStart) or item.action == "alloc":
            yield from map(Free, sorted(freed))
            freed.clear()
        if isinstance(item, PhaseStart):
            yield item
        elif item.action == "alloc" and item.size_bytes:
            live[item.address] = count
            yield Alloc(count, item.size_bytes, Category.TEMPORARY, item.site, stream=item.stream)
            count += 1
        elif item.action == "free_completed" and item.address in live:
            freed.append(live.pop(item.address))
    yield from map(Free, sorted(freed))


def lifetimes(events: Iterable[Event]) -> dict[int, int]:
    """Return the number of allocations before each block is freed, by block number.

    Blocks that are never freed are left out.
    """
    counts: dict[int, int] = {}
    count = 0
    for event in events:
        count += isinstance(event, Alloc)
        if isinstance(event, Free):
            counts[event.block] = count
    return counts


def allocations_of(
    events: Sequence[Event], sites: Sequence[Site], config: AllocatorConfig
) -> list[Allocation]:
    """Return the `Allocation` of each `Alloc` event, with its size rounded.

    Sizes are rounded as with the allocator configuration `config`.
    """
    ends = lifetimes(events)
    allocations = []
    mark = PhaseStart(0, Phase.SETUP)
    for event in events:
        if isinstance(event, PhaseStart):
            mark = event
        elif isinstance(event, Alloc):
            site = sites[event.site] if 0 <= event.site < len(sites) else Site("", "")
            rounded = config.block_bytes(event.size_bytes)
            times = (ends.get(event.block), mark.step, mark.phase)
            allocations.append(Allocation(event.size_bytes, rounded, *times, site, event.category))
    return allocations


def common_phase_starts(traced: Iterable[Event], recorded: Iterable[Event], ends: Pair) -> list[Pair]:
    """Return the allocation counts of trace and recording at the starts of their common phases.

    A count is the number of allocations before the phase, and the phases are in order. The list begins with
    (0, 0) and ends with `ends`. A phase that begins several times in a step, as with gradient accumulation,
    is identified by its turn.
    """
    places = _phase_starts(recorded)
    cuts: list[Pair] = [(0, 0)]
    for key, place in _phase_starts(traced).items():
        other = places.get(key)
        if other is not None and place >= cuts[-1][0] and other >= cuts[-1][1]:
            cuts.append((place, other))
    return list(dict.fromkeys([*cuts, ends]))


def _phase_starts(events: Iterable[Event]) -> dict[tuple[int, Phase, int], int]:
    """Return the number of allocations before each phase starts, by step, phase and turn."""
    starts: dict[tuple[int, Phase, int], int] = {}
    turns: dict[PhaseStart, int] = {}
    count = 0
    for event in events:
        count += isinstance(event, Alloc)
        if isinstance(event, PhaseStart):
            turns[event] = turns.get(event, 0) + 1
            starts[event.step, event.phase, turns[event]] = count
    return starts


def common_lifetimes(allocations: Sequence[Allocation], matched: Collection[int]) -> list[int]:
    """Return the number of matched allocations before each allocation is freed.

    For an allocation that is never freed, all matched allocations count.
    """
    before = list(accumulate((index in matched for index in range(len(allocations))), initial=0))
    return [before[-1 if one.freed is None else one.freed] for one in allocations]
