"""Replay a recorded history through the simulator, and compare the two at each event.

The simulator gets the recorded requests. The simulator's changes of segments and the address of each block
must equal the recorded changes and addresses, byte for byte. The addresses that CUDA returned and the
requests that it refused are taken from the record. Whether addresses decide which of several equal blocks is
reused depends on the version of torch that the record names.

A call of `empty_cache`, and a request that CUDA refuses at first, are recorded only by the segments that they
release. The next request tells the two apart: CUDA did not refuse it if a cached block serves it, or if CUDA
provided more memory at another time than the request needs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest

from msgspec import Struct

from planner.allocator.blocks import Block, SegmentEvent, SegmentState
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import (
    DEFAULT_LARGE_SEGMENT_BYTES,
    MIB,
    MemoryLimits,
    config_of_torch,
    parse_alloc_conf,
)
from planner.allocator.history.history import SEGMENT_SIGNS, History, HistoryEvent

_GRANTS = ("segment_alloc", "segment_map")


class HistoryCheck(Struct, frozen=True):
    """How a replay compares with its record: the first difference, and counts of the events before it."""

    difference: str | None  # the first difference, in words; None if all events are equal
    allocations: int  # number of allocations at equal addresses
    frees: int  # number of frees of recorded blocks
    segment_events: int  # number of equal changes of reserved memory
    peak_allocated_bytes: int  # up to the first difference
    peak_reserved_bytes: int
    retries: int = 0  # number of requests that were refused at first and then served
    ooms: int = 0  # number of requests that failed
    emptied: int = 0  # calls of `empty_cache` that released something
    # The lowest reserved bytes that CUDA refused to reach; None if CUDA refused no request. The memory that
    # the process could get is less than this, and at least the reserved peak.
    refused_bytes: int | None = None


class _DiffersError(Exception):
    """The error for the first event in which the simulator differs from the record."""


@dataclass(slots=True)
class _Cuda:
    """A stand-in for CUDA that answers requests from the recorded segment events."""

    made: list[SegmentEvent]  # the simulator's segment events for this request
    recorded: list[SegmentEvent] = field(default_factory=list)
    fails: bool = False  # whether the request ends in an out-of-memory error
    ranges: list[tuple[int, int]] = field(default_factory=list)  # start and end of expandable segments
    used: int = 0
    refused: list[int] = field(default_factory=list)  # reserved bytes that CUDA refused to reach
    reserved_bytes: int = 0  # reserved bytes before the request

    def serve(self, segments: list[SegmentEvent], event: HistoryEvent, reserved_bytes: int) -> None:
        self.recorded, self.used, self.fails = segments, 0, event.action == "oom"
        self.reserved_bytes = reserved_bytes
        self.made.clear()
        self.refused.clear()

    def address(self, size_bytes: int) -> int:
        for position in range(self.used, len(self.recorded)):
            event = self.recorded[position]
            if event.action == "segment_alloc":
                self.used = position + 1
                return event.address
            inside = any(first <= event.address < end for first, end in self.ranges)
            if event.action == "segment_map" and not inside:
                self.ranges.append((event.address, event.address + size_bytes))
                return event.address
        raise self._unasked(size_bytes)

    def refuses(self, size_bytes: int) -> bool:
        """Return whether CUDA refused, by the record, the request that the simulator makes now.

        After a refusal, torch released memory or failed. Raises _DiffersError if the record has no request to
        CUDA at this point.
        """
        place = len(self.made)
        following = self.recorded[place] if place < len(self.recorded) else None
        if following is not None and following.action in _GRANTS:
            return False
        if following is None and not self.fails:
            raise self._unasked(size_bytes)
        changed_bytes = sum(SEGMENT_SIGNS[one.action] * one.size_bytes for one in self.made)
        self.refused.append(self.reserved_bytes + changed_bytes + size_bytes)
        return True

    def _unasked(self, size_bytes: int) -> _DiffersError:
        return _DiffersError(f"the simulator asks CUDA for {_size(size_bytes)} of memory, torch did not")


def check_history(history: History) -> HistoryCheck:
    """Replay a history through the simulator, and return the first difference and counts of events.

    The simulator has the recorded memory limit. CUDA's refusals are taken from the record too, since contexts
    and other processes take an unknown part of the GPU's memory. Raises UsageError for allocator options that
    are not simulated.
    """
    return _Check(history).run()


class _Check:
    """One replay of a history through the simulator, with its counts."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._cuda = _Cuda([])
        self._config = parse_alloc_conf(history.alloc_conf, config_of_torch(history.torch))
        total = history.total_bytes
        # CUDA's refusals are taken from the record; the capacity only sizes expandable segments.
        capacity = total if total is not None else _total_of_ranges(history)
        self._allocator = CachingAllocator(
            MemoryLimits(capacity, history.limit_bytes, capacity, self._config),
            self._cuda.address,
            self._cuda.made,
            self._cuda.refuses,
        )
        self._blocks = self._allocator.hold(history.start)
        self._cuda.ranges += self._allocator.ranges()
        changes = (SEGMENT_SIGNS.get(event.action, 0) * event.size_bytes for event in history.events)
        self._most_bytes = max(accumulate(changes, initial=self._allocator.reserved_bytes))
        self._allocations = self._frees = self._segment_events = self._emptied = 0
        self._retries = self._ooms = 0
        self._refused: list[int] = []

    def run(self) -> HistoryCheck:
        index, difference = 0, None
        try:
            for at, segments, event in _requests(self._history.events):
                index = at
                self._serve(segments, event)
        except _DiffersError as differs:
            difference = f"event {index} of {len(self._history.events)}: {differs}"
        allocator = self._allocator
        return HistoryCheck(
            difference,
            self._allocations,
            self._frees,
            self._segment_events,
            allocator.peak_allocated_bytes,
            allocator.peak_reserved_bytes,
            self._retries,
            self._ooms,
            self._emptied,
            min(self._refused, default=None),
        )

    def _serve(self, segments: list[SegmentEvent], event: HistoryEvent) -> None:
        """Replay one request, and first any `empty_cache` before it, and compare the segment events."""
        emptied = self._emptied_first(segments, event)
        if emptied:
            self._cuda.serve(segments[:emptied], event, self._allocator.reserved_bytes)
            self._allocator.empty_cache()
            self._compare(segments[:emptied])
            self._emptied += 1
        self._cuda.serve(segments[emptied:], event, self._allocator.reserved_bytes)
        retries = self._allocator.retries
        _follow(self._allocator, self._blocks, event)
        self._compare(segments[emptied:])
        self._allocations += event.action == "alloc"
        self._frees += event.action == "free_completed"
        self._ooms += event.action == "oom"
        self._retries += event.action == "alloc" and self._allocator.retries > retries
        self._refused += self._cuda.refused

    def _emptied_first(self, segments: list[SegmentEvent], event: HistoryEvent) -> int:
        """Return the number of segment events that `empty_cache` caused before the request."""
        released = next((at for at, one in enumerate(segments) if one.action in _GRANTS), len(segments))
        if not released or event.action == "oom":
            return 0
        if event.action != "alloc":
            return released
        if self._config.max_split_bytes is not None or self._config.garbage_collection_threshold > 0:
            return released if self._would_release() == segments[:released] else 0
        needed_bytes = self._allocator.missing_bytes(event.size_bytes, event.stream)
        fits = needed_bytes == 0 or self._allocator.reserved_bytes + needed_bytes <= self._most_bytes
        return released if fits else 0

    def _would_release(self) -> list[SegmentEvent]:
        """Return the segment events that `empty_cache` would cause now."""
        released: list[SegmentEvent] = []
        twin, _ = self._allocator.copy(released)
        twin.empty_cache()
        return released

    def _compare(self, recorded: list[SegmentEvent]) -> None:
        for theirs, ours in zip_longest(recorded, self._cuda.made):
            if theirs != ours:
                raise _DiffersError(f"torch: {_described(theirs)}; the simulator: {_described(ours)}")
        self._segment_events += len(recorded)


_END = HistoryEvent("end", 0, 0)


def _requests(
    events: tuple[HistoryEvent, ...],
) -> Iterator[tuple[int, list[SegmentEvent], HistoryEvent]]:
    """Yield the index of each request, the segment events since the request before, and the request.

    Requests are allocations, completed frees and out-of-memory errors. An `end` event follows if segment
    events come after the last request.
    """
    segments: list[SegmentEvent] = []
    for index, event in enumerate(events):
        if event.action in SEGMENT_SIGNS:
            segments.append(SegmentEvent(event.action, event.address, event.size_bytes))  # type: ignore[arg-type]
        elif event.action in ("alloc", "free_completed", "oom"):
            yield index, segments, event
            segments = []
    if segments:
        yield len(events), segments, _END


def _follow(allocator: CachingAllocator, blocks: dict[int, Block], event: HistoryEvent) -> None:
    """Replay one request; raise _DiffersError if the outcome or the block's address differs.

    The event `end` is not a request, and is skipped.
    """
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
            f"{request}: torch's block is at {event.address:#x}, the simulator's at {got.address:#x}"
        )
    blocks[event.address] = got


def _total_of_ranges(history: History) -> int | None:
    """Derive the GPU's memory size from the addresses of expandable segments; return None if unknown.

    The size follows from the least distance of two segments, and is unknown with fewer than two. torch
    reserves 9/8 of the GPU's memory size for each expandable segment. The pages of a segment are mapped
    starting at its beginning, so pages mapped without a hole are one segment.
    """
    starts = _range_starts(history.start, history.events)
    nearest_bytes = min((upper - lower for lower, upper in pairwise(starts)), default=0)
    whole_bytes = nearest_bytes // DEFAULT_LARGE_SEGMENT_BYTES * DEFAULT_LARGE_SEGMENT_BYTES
    return whole_bytes * 8 // 9 or None


def _range_starts(start: Iterable[SegmentState], events: Iterable[HistoryEvent]) -> list[int]:
    """Return the start addresses of recorded expandable segments, in ascending order.

    The list is empty if no event maps a page.
    """
    spans: list[tuple[int, int]] = []
    of_pools: dict[tuple[int, str], tuple[int, int]] = {}
    for state in start:
        end = state.address + state.size_bytes
        first, last = of_pools.get((state.stream, state.pool), (state.address, end))
        of_pools[state.stream, state.pool] = min(first, state.address), max(last, end)
    mapped = [event for event in events if event.action == "segment_map"]
    if not mapped:
        return []
    spans = [*of_pools.values(), *((one.address, one.address + one.size_bytes) for one in mapped)]
    starts: list[int] = []
    end = -1
    for first, last in sorted(spans):
        if first > end:
            starts.append(first)
        end = max(end, last)
    return starts


def _described(event: SegmentEvent | None) -> str:
    return (
        "nothing" if event is None else f"{event.action} of {_size(event.size_bytes)} at {event.address:#x}"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({size_bytes / MIB:.2f} MiB)"
