"""Count the retries and the CUDA calls of the allocator in each step of a replay.

In a retry, the process waits for the GPU.
"""

from msgspec import Struct

from planner.allocator import Block, CachingAllocator, MemoryLimits, SegmentEvent, replay_trace
from planner.program import Event, PhaseStart, Trace

_FREES = ("segment_free", "segment_unmap")


class RetryCost(Struct, frozen=True):
    """The retries and CUDA calls of the allocator in one step."""

    retries: int  # requests for which all cached memory was released first
    cuda_frees: int  # calls of cudaFree; with expandable segments, of cuMemUnmap
    cuda_mallocs: int  # calls of cudaMalloc; with expandable segments, of cuMemMap


def count_retries(trace: Trace, limits: MemoryLimits) -> tuple[RetryCost, ...]:
    """Return the allocator's retries and CUDA calls in each step of a replay.

    The replay ends at the first failure. The first step includes the set-up.
    """
    changes: list[SegmentEvent] = []
    costs: list[RetryCost] = []
    retries = step = 0

    def count(allocator: CachingAllocator, index: int, event: Event, block: Block | None) -> None:
        nonlocal retries, step
        if isinstance(event, PhaseStart):
            if event.step > step > 0:
                costs.append(_cost(changes, allocator.retries - retries))
                retries = allocator.retries
                changes.clear()
            step = event.step

    run = replay_trace(trace, limits, count, changes)
    return (*costs, _cost(changes, run.retries - retries))


def _cost(changes: list[SegmentEvent], retries: int) -> RetryCost:
    frees = sum(1 for change in changes if change.action in _FREES)
    return RetryCost(retries, frees, len(changes) - frees)
