"""Count the steps that a loop with growing memory can run before it runs out of memory.

The last traced step is replayed until a request fails.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import MemoryLimits, Player, max_reserved_bytes
from planner.program import Alloc, Category, Growth, NextWorkspaces, Piece, Trace, cut_trace, is_periodic

MOST_EVENTS = 300_000  # events to replay to count steps, which takes about a second


class StepLimit(Struct, frozen=True):
    """The number of steps that a loop can run before memory runs out, replayed or extrapolated."""

    steps: int
    is_exact: bool  # whether all steps were replayed; if not, extrapolated from the growth of a step


def find_step_limit(trace: Trace, limits: MemoryLimits, growth: Growth, peak_bytes: int) -> StepLimit | None:
    """Return the number of steps of a growing loop that fit, or None if memory never runs out.

    Memory never runs out if it has no limit, or if growth ends before the limit is reached. `peak_bytes` is
    the reserved peak of the traced steps. The number is extrapolated from the growth of a step if the traced
    steps do not repeat, or if the steps that fit are too many to replay.
    """
    limit_bytes = max_reserved_bytes(limits)
    if limit_bytes is None:
        return None
    guess = growth.steps + max(0, limit_bytes - peak_bytes) // growth.bytes_per_step
    if growth.last_step is not None and guess >= growth.last_step:
        return None
    steps = cut_trace(_without_activations(trace))
    most = MOST_EVENTS // max(1, sum(len(piece.trace.events) for piece in steps[-1]))
    if is_periodic(steps) and guess < most:
        played = _played(steps, limits, trace.next_workspaces, most)
        if played is not None:
            return StepLimit(played, is_exact=True)
    return StepLimit(guess, is_exact=False)


def _without_activations(trace: Trace) -> Trace:
    """Return the trace with its activations relabelled as temporaries.

    Blocks that the end of the trace leaves allocated count as activations. Without that label, equal steps
    compare as equal.
    """
    events = (
        replace(one, category=Category.TEMPORARY)
        if isinstance(one, Alloc) and one.category is Category.ACTIVATION
        else one
        for one in trace.events
    )
    return replace(trace, events=tuple(events))


def _played(
    steps: Sequence[Sequence[Piece]], limits: MemoryLimits, next_workspaces: NextWorkspaces | None, most: int
) -> int | None:
    """Replay steps, the last again and again, and return how many fit, or None if `most` steps fit."""
    player = Player(limits, next_workspaces)
    for number in range(most + 1):
        if not all(player.play(piece, number) for piece in steps[min(number, len(steps) - 1)]):
            return max(0, number - 1)
    return None
