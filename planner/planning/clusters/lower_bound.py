"""Compute lower bounds on the memory of a rank from splits that were traced."""

from collections.abc import Iterator

from msgspec import Struct

from planner.planning.clusters.splits import Split
from planner.planning.phases import alive_blocks
from planner.program import Category, Trace

_OWN = 0.9  # share of a rank's shards that counts; the rest may be padding
_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)


class TracedSplit(Struct, frozen=True):
    """A split, with the state bytes of a traced rank and its memory peaks in unlimited memory."""

    split: Split
    allocated_bytes: int
    reserved_bytes: int
    state_bytes: int


def state_bytes_of(trace: Trace) -> int:
    """Return the bytes of weights, gradients and optimizer state that are allocated at the end of a trace."""
    return sum(block.size_bytes for block in alive_blocks(trace.events, _STATES))


def least_bytes(split: Split, traced: list[TracedSplit]) -> int:
    """Return a lower bound on a rank's reserved bytes, or 0 if no traced split gives a bound.

    The bound is the largest of three:

    - the reserved peak of a traced split that needs no more memory: its recipe saves as much or more, it has
      as many shards or more, and its micro-batch is no larger;
    - the share `_OWN` of the states of all shards of a traced split with equal tensor parallel, divided by
      the number of shards of `split`;
    - a line through two traced splits of the same recipe that differ only in shards or only in micro-batch.

    Each tensor has a part in proportion to the micro-batch or to a shard. So the allocated peak is a convex
    function of either, and beyond two points it is above the line through them.
    """
    comparable = [one for one in traced if _takes_no_more(one.split, split)]
    states = (
        int(_OWN * one.state_bytes * one.split.shards / split.shards)
        for one in traced
        if one.split.recipe.tp == split.recipe.tp
    )
    return max([0, *states, *(one.reserved_bytes for one in comparable), *_extrapolated(split, traced)])


def _takes_no_more(one: Split, other: Split) -> bool:
    accumulates_no_more = one.accumulate == 1 or other.accumulate > 1  # accumulation takes a second gradient
    no_larger = one.shards >= other.shards and one.micro_batch <= other.micro_batch
    return accumulates_no_more and no_larger and other.recipe.saves_no_more_than(one.recipe)


def _extrapolated(split: Split, traced: list[TracedSplit]) -> Iterator[int]:
    own = [
        (_place(one.split), one.allocated_bytes)
        for one in traced
        if one.split.recipe == split.recipe
        if (one.split.accumulate > 1) == (split.accumulate > 1)
    ]
    shard, micro_batch = _place(split)
    for axis, at in ((0, micro_batch), (1, shard)):
        if axis == 0 and split.shards == 1:  # without FSDP, which gathers
            continue
        line = sorted((place[axis], size) for place, size in own if place[1 - axis] == at)
        wanted = (shard, micro_batch)[axis]
        for (low, less), (high, more) in zip(line, line[1:], strict=False):
            if low < high < wanted:
                yield more + int((more - less) / (high - low) * (wanted - high))


def _place(split: Split) -> tuple[float, float]:
    return 1 / split.shards, split.micro_batch
