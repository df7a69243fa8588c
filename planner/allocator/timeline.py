"""Record the allocated and the reserved bytes after each replayed event.

The allocated bytes are recorded in total and by category.
"""

from collections.abc import Mapping

from msgspec import Struct

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.program import Alloc, Category, Event, Free, PhaseStart


class Timeline(Struct, frozen=True):
    """The allocated bytes, in total and by category, and the reserved bytes after each event of a replay.

    Blocks count with their full sizes, as in torch's `memory_allocated`; the categories add up to
    `allocated_bytes`.
    """

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    by_category: Mapping[Category, tuple[int, ...]]
    marks: tuple[tuple[int, PhaseStart], ...]  # index of the event, and the start of a phase

    @property
    def peak_event(self) -> int:
        """Return the index of the first event at which the allocated bytes reach their peak."""
        return self.allocated_bytes.index(max(self.allocated_bytes))

    @property
    def reserved_peak_event(self) -> int:
        """Return the index of the first event at which the reserved bytes reach their peak."""
        return self.reserved_bytes.index(max(self.reserved_bytes))


class TimelineRecorder:
    """A callback for `replay_trace` that records a `Timeline`."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[Category, int]] = {}
        self._levels = dict.fromkeys(Category, 0)
        self._columns: dict[Category, list[int]] = {category: [] for category in Category}
        self._allocated: list[int] = []
        self._reserved: list[int] = []
        self._marks: list[tuple[int, PhaseStart]] = []

    def __call__(self, allocator: CachingAllocator, index: int, event: Event, block: Block | None) -> None:
        if isinstance(event, Alloc):
            if block is None:
                return
            self._live[event.block] = event.category, block.size_bytes
            self._levels[event.category] += block.size_bytes
        elif isinstance(event, Free):
            category, size_bytes = self._live.pop(event.block)
            self._levels[category] -= size_bytes
        else:
            self._marks.append((index, event))
        self._allocated.append(allocator.allocated_bytes)
        self._reserved.append(allocator.reserved_bytes)
        for category, column in self._columns.items():
            column.append(self._levels[category])

    def timeline(self) -> Timeline:
        """Return the timeline of the events recorded until now."""
        columns = {category: tuple(column) for category, column in self._columns.items()}
        return Timeline(tuple(self._allocated), tuple(self._reserved), columns, tuple(self._marks))


def thin(timeline: Timeline, most: int) -> list[int]:
    """Return the indices of about `most` selected events, or of all events if they are few.

    Selected are the event with the most allocated bytes in each of about `most` stretches of equal length,
    the allocated and the reserved peak, and the first and the last event.
    """
    allocated = timeline.allocated_bytes
    width = -(-len(allocated) // most)
    if width <= 1:
        return list(range(len(allocated)))
    starts = range(0, len(allocated), width)
    highest = {max(range(i, min(i + width, len(allocated))), key=lambda j: allocated[j]) for i in starts}
    peaks = {timeline.peak_event, timeline.reserved_peak_event, 0, len(allocated) - 1}
    return sorted(highest | peaks)
