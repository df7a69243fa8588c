"""A recorded history of the CUDA caching allocator, replayed through the simulator event by event.

torch records with `torch.cuda.memory._record_memory_history` what its allocator did: blocks allocated and
freed, segments that came from CUDA and went back to it, each with its address and size. The requests are
put to the simulator; what it does to its segments, and where it puts each block, must be what was recorded,
byte for byte. CUDA's choice of addresses is taken from the record; whether it decides which of several equal
blocks is reused depends on the version of torch that the record names.

Actions as torch names them (c10/cuda/CUDACachingAllocator.h, `TraceEntry`): `alloc` with the requested size,
`free_requested` and `free_completed` with the block's address, `segment_alloc` and its like, `oom` with the
rounded size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct

from planner.allocator.blocks import Block, SegmentEvent
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MIB, MemoryLimits, config_of_torch, parse_alloc_conf
from planner.program import Phase, Site

SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
ACTIONS = ("alloc", "free_requested", "free_completed", *SEGMENT_ACTIONS, "oom", "snapshot")


class HistoryEvent(NamedTuple):
    """One thing that torch's allocator did."""

    action: str  # one of `ACTIONS`
    address: int
    size_bytes: int  # of an allocation, as it was requested
    site: int = -1  # index into the sites of the history; -1: not known
    stream: int = 0  # any number of its own; 0: the default stream


class HistoryMark(NamedTuple):
    """The start of a phase of the loop in a history."""

    allocations: int  # `alloc` events before it
    step: int
    phase: Phase


class History(Struct, frozen=True):
    """All events of a process, from before its first tensor on."""

    gpu: str
    torch: str  # version
    alloc_conf: str  # the text of PYTORCH_ALLOC_CONF
    total_bytes: int | None  # the card's memory as torch sees it
    limit_bytes: int | None  # what `set_per_process_memory_fraction` allowed
    events: tuple[HistoryEvent, ...]
    marks: tuple[HistoryMark, ...] = ()
    sites: tuple[Site, ...] = ()  # allocating code: FILE:LINE of the user's code, function
    notes: tuple[str, ...] = ()  # what is odd about the record


class HistoryCheck(Struct, frozen=True):
    """The events up to which simulator and record agree."""

    difference: str | None  # the first one, in words; None: there is none
    allocations: int  # blocks allocated alike
    segment_events: int  # changes of reserved memory alike
    peak_allocated_bytes: int  # until the difference
    peak_reserved_bytes: int


class _DiffersError(Exception):
    """The simulator did something else than torch."""


@dataclass(slots=True)
class _Addresses:
    """CUDA's choices, from the segment events that are recorded for the request being served."""

    recorded: list[SegmentEvent] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)  # of expandable segments: first, end
    used: int = 0

    def next(self, size_bytes: int) -> int:
        for position in range(self.used, len(self.recorded)):
            event = self.recorded[position]
            if event.action == "segment_alloc":
                self.used = position + 1
                return event.address
            inside = any(first <= event.address < end for first, end in self.ranges)
            if event.action == "segment_map" and not inside:
                self.ranges.append((event.address, event.address + size_bytes))
                return event.address
        raise _DiffersError(f"the simulator asks CUDA for {_size(size_bytes)} of memory, torch did not")


def check_history(history: History) -> HistoryCheck:
    """Replay a history that began before the first tensor; describe the first difference.

    The simulator runs out at the limit and at the card's total; where CUDA itself refused memory before that,
    for the sake of others on the card, the history differs. Raises UsageError for allocator options that are
    not simulated.
    """
    made: list[SegmentEvent] = []
    addresses = _Addresses()
    allocator = CachingAllocator(
        MemoryLimits(
            history.total_bytes,
            history.limit_bytes,
            history.total_bytes,
            parse_alloc_conf(history.alloc_conf, config_of_torch(history.torch)),
        ),
        addresses.next,
        made,
    )
    blocks: dict[int, Block] = {}
    allocations = segment_events = index = 0
    difference = None
    try:
        for at, segments, event in _requests(history.events):
            index = at
            addresses.recorded, addresses.used = segments, 0
            made.clear()
            _follow(allocator, blocks, event)
            _compare_segments(segments, made)
            segment_events += len(made)
            allocations += event.action == "alloc"
    except _DiffersError as differs:
        difference = f"event {index} of {len(history.events)}: {differs}"
    return HistoryCheck(
        difference, allocations, segment_events, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    )


_END = HistoryEvent("end", 0, 0)


def _requests(
    events: tuple[HistoryEvent, ...],
) -> Iterator[tuple[int, list[SegmentEvent], HistoryEvent]]:
    """Yield each request with its index and the segment events that torch recorded while serving it."""
    segments: list[SegmentEvent] = []
    for index, event in enumerate(events):
        if event.action in SEGMENT_ACTIONS:
            segments.append(SegmentEvent(event.action, event.address, event.size_bytes))  # type: ignore[arg-type]
        elif event.action in ("alloc", "free_completed", "oom"):
            yield index, segments, event
            segments = []
    if segments:
        yield len(events), segments, _END


def _follow(allocator: CachingAllocator, blocks: dict[int, Block], event: HistoryEvent) -> None:
    """Put one request to the simulator and compare what it hands out."""
    if event.action == "end":
        return
    if event.action == "free_completed":
        block = blocks.pop(event.address, None)
        if block is None:
            raise _DiffersError(f"a block at {event.address:#x} is freed that no recorded request got")
        allocator.free(block)
        return
    got = allocator.malloc(event.size_bytes, event.stream)
    if event.action == "oom":
        if got is not None:
            raise _DiffersError(f"torch found no memory for {_size(event.size_bytes)}, the simulator did")
        return
    if got is None:
        raise _DiffersError(f"the simulator finds no memory for {_size(event.size_bytes)}, torch did")
    if got.address != event.address:
        request = f"{_size(event.size_bytes)} asked for"
        raise _DiffersError(
            f"{request}: torch's block lies at {event.address:#x}, the simulator's at {got.address:#x}"
        )
    blocks[event.address] = got


def _compare_segments(recorded: list[SegmentEvent], made: list[SegmentEvent]) -> None:
    for theirs, ours in zip_longest(recorded, made):
        if theirs != ours:
            raise _DiffersError(f"torch: {_described(theirs)}; the simulator: {_described(ours)}")


def _described(event: SegmentEvent | None) -> str:
    return (
        "nothing" if event is None else f"{event.action} of {_size(event.size_bytes)} at {event.address:#x}"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({size_bytes / MIB:.2f} MiB)"
