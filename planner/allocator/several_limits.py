"""Replay one trace under several memory limits, and reuse replays with equal results.

The caching allocator is not monotone in its memory: which segments it releases when a request is refused, and
so how it splits segments afterwards, depends on the limit. A trace that fits one limit may fail under a
larger limit.
"""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from planner.allocator.config import MemoryLimits
from planner.allocator.replay import Replay
from planner.program import Outcome


def is_limit_independent(limits: MemoryLimits) -> bool:
    """Return whether the limits affect the allocator only by refusing requests.

    Limits have further effects with expandable segments, a garbage collection threshold or a memory fraction.
    """
    config = limits.config
    fraction = config.per_process_memory_fraction < 1
    return not (config.expandable_segments or config.garbage_collection_threshold > 0 or fraction)


def replay_under_limits(
    all_limits: Iterable[MemoryLimits], replay: Callable[[MemoryLimits], Replay]
) -> Iterator[tuple[MemoryLimits, Replay]]:
    """Yield memory limits with their replays, in descending order of the limits, reusing equal replays.

    A replay is reused for smaller limits that are not below its peak reserved bytes, if the limits act only
    through refused requests, and the replay fits without retries or the limits differ only in the capacity.
    """
    last: tuple[MemoryLimits, Replay] | None = None
    for limits in sorted(all_limits, key=_size, reverse=True):
        if last is None or not _goes_alike(last[0], last[1], limits):
            last = limits, replay(limits)
        yield limits, last[1]


def _size(limits: MemoryLimits) -> int:
    return limits.allocator_limit_bytes or 0


def _goes_alike(larger: MemoryLimits, run: Replay, limits: MemoryLimits) -> bool:
    """Return whether a replay under larger limits is also the replay under `limits`.

    `run` is the replay under the limits `larger`.
    """
    if not is_limit_independent(limits) or run.peak_reserved_bytes > _size(limits):
        return False
    only_capacity = larger == replace(
        limits, capacity_bytes=larger.capacity_bytes, total_bytes=larger.total_bytes
    )
    return run.outcome is Outcome.FITS or only_capacity
