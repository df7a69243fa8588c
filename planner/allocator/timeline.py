"""Record the levels of a replay event by event: allocated, by category, and reserved."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart


class Timeline(Struct, frozen=True):
    """The levels after each event of a replay, in bytes.

    Blocks count whole, as torch's `memory_allocated` counts them; the categories add up to `allocated_bytes`.
    """

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    by_category: Mapping[Category, tuple[int, ...]]
    marks: tuple[tuple[int, PhaseStart], ...]  # index of the event, start of a phase

    @property
    def peak_event(self) -> int:
        """Return the index of the first event at the allocated peak."""
        return self.allocated_bytes.index(max(self.allocated_bytes))

    @property
    def reserved_peak_event(self) -> int:
        """Return the index of the first event at the reserved peak."""
        return self.reserved_bytes.index(max(self.reserved_bytes))


class PhasePeak(Struct, frozen=True):
    """The highest levels within one phase of one step, and the allocated bytes at its end."""

    step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    end_allocated_bytes: int


class TimelineRecorder:
    """A recorder of a `Timeline`, to be passed as `on_event` of `replay_trace`."""

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
        """Return the recorded timeline."""
        columns = {category: tuple(column) for category, column in self._columns.items()}
        return Timeline(tuple(self._allocated), tuple(self._reserved), columns, tuple(self._marks))


def phase_peaks(timeline: Timeline) -> tuple[PhasePeak, ...]:
    """Return the highest levels of each phase that has events, in the order in which phases first begin.

    Memory from before the phase counts. A phase that comes several times in a step, as with gradient
    accumulation, is listed once.
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
    """Yield first event, end and mark of each stretch that has events after its mark, set-up first."""
    total = len(timeline.allocated_bytes)
    starts = [index for index, _ in timeline.marks]
    if not starts or starts[0] > 0:
        yield 0, starts[0] if starts else total, PhaseStart(0, Phase.SETUP)
    for (start, mark), end in zip(timeline.marks, [*starts[1:], total], strict=bool(starts)):
        if end - start > 1:
            yield start, end, mark


def thin(timeline: Timeline, most: int) -> list[int]:
    """Return indices of about `most` events: the highest of each stretch, both peaks, and both ends."""
    allocated = timeline.allocated_bytes
    width = -(-len(allocated) // most)
    if width <= 1:
        return list(range(len(allocated)))
    starts = range(0, len(allocated), width)
    highest = {max(range(i, min(i + width, len(allocated))), key=lambda j: allocated[j]) for i in starts}
    peaks = {timeline.peak_event, timeline.reserved_peak_event, 0, len(allocated) - 1}
    return sorted(highest | peaks)
