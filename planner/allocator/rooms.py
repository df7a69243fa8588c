"""Replays of one trace in rooms of several sizes.

The caching allocator is not monotone in the memory that it has: what it releases at a refused request, and
so how segments are cut from then on, depends on the room. A trace that runs in one room may fail in a larger.
"""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from planner.allocator.config import MemoryLimits
from planner.allocator.replay import Replay
from planner.program import Outcome


def is_limit_independent(limits: MemoryLimits) -> bool:
    """Return whether nothing but a refused request lets the allocator act on how much memory there is."""
    config = limits.config
    fraction = config.per_process_memory_fraction < 1
    return not (config.expandable_segments or config.garbage_collection_threshold > 0 or fraction)


def replay_in_rooms(
    rooms: Iterable[MemoryLimits], replay: Callable[[MemoryLimits], Replay]
) -> Iterator[tuple[MemoryLimits, Replay]]:
    """Yield the replay in each room, the largest first.

    A replay stands for the rooms from its peak reserved to its own, where each request has the same answer;
    one without retries for all above its peak.
    """
    last: tuple[MemoryLimits, Replay] | None = None
    for limits in sorted(rooms, key=_size, reverse=True):
        if last is None or not _goes_alike(last[0], last[1], limits):
            last = limits, replay(limits)
        yield limits, last[1]


def _size(limits: MemoryLimits) -> int:
    return limits.allocator_limit_bytes or 0


def _goes_alike(larger: MemoryLimits, run: Replay, limits: MemoryLimits) -> bool:
    """Return whether a run in a larger room is the run in this one as well."""
    if not is_limit_independent(limits) or run.peak_reserved_bytes > _size(limits):
        return False
    only_capacity = larger == replace(
        limits, capacity_bytes=larger.capacity_bytes, total_bytes=larger.total_bytes
    )
    return run.outcome is Outcome.FITS or only_capacity
