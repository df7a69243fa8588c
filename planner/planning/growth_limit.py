"""Count the steps that a loop of growing memory can run, by repeating its last step until it fails."""

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import (
    Block,
    CachingAllocator,
    MemoryLimits,
    OptionalRequests,
    max_reserved_bytes,
)
from planner.program import (
    Action,
    Category,
    Dealloc,
    Growth,
    Malloc,
    Retain,
    StepSequence,
    Trace,
    split_steps,
)

MOST_EVENTS = 300_000  # that are played to count steps, which takes about a second


class StepLimit(Struct, frozen=True):
    """The number of steps after which a loop no longer fits."""

    steps: int
    is_exact: bool  # all steps were played; else extrapolated by the growth of a step


def find_step_limit(trace: Trace, limits: MemoryLimits, growth: Growth, peak_bytes: int) -> StepLimit | None:
    """Return the number of steps that fit, or None if all do. The traced steps reserve `peak_bytes`."""
    room = max_reserved_bytes(limits)
    if room is None:
        return None
    guess = growth.steps + max(0, room - peak_bytes) // growth.bytes_per_step
    if growth.last_step is not None and guess >= growth.last_step:
        return None
    loop = split_steps(trace)
    steps = [_without_categories(step) for step in loop.steps]
    most = MOST_EVENTS // max(1, len(steps[-1]))
    if steps[-1] == steps[-2] and guess < most:
        played = _played(loop, limits, most)
        if played is not None:
            return StepLimit(played, is_exact=True)
    return StepLimit(guess, is_exact=False)


def _without_categories(step: tuple[Action, ...]) -> list[Action]:
    """Return the requests of a step with one category for all, so that equal steps compare as equal.

    Otherwise blocks that the end of the trace leaves allocated would count as activations.
    """
    return [replace(one, category=Category.TEMPORARY) if isinstance(one, Malloc) else one for one in step]


def _played(loop: StepSequence, limits: MemoryLimits, most: int) -> int | None:
    """Return the number of steps that fit before a step fails, or None if `most` steps fit."""
    allocator = CachingAllocator(limits)
    optional = OptionalRequests()
    blocks: dict[tuple[int, int], Block] = {}
    for number in range(most + 1):
        request = 0
        for action in loop.setup if number == 0 else loop.steps[min(number, len(loop.steps)) - 1]:
            if isinstance(action, Dealloc):
                allocator.free(blocks.pop((number - action.age, action.number)))
                if action.empties_cache:
                    allocator.empty_cache()
            elif isinstance(action, Malloc | Retain):
                size, stream = action.size_bytes, action.stream
                if isinstance(action, Malloc) and action.optional:
                    block = optional.malloc(allocator, size, stream=stream)
                else:
                    block = allocator.malloc(size, stream)
                if block is None:
                    return max(0, number - 1)
                if isinstance(action, Malloc):
                    blocks[number, request] = block
                    request += 1
    return None
