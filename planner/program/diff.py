"""Compare the events of two traces pair by pair."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from planner.program.events import Alloc, Event, Free, PhaseStart, Trace


def match_events(
    one: Trace, ones: Sequence[Event], other: Trace, others: Sequence[Event]
) -> Iterator[tuple[Event, Event, bool]]:
    """Yield the events of two traces in pairs, each with whether the two match, until one trace ends.

    Sizes, block numbers and site numbers do not count.
    """
    blocks: dict[int, int] = {}
    for a, b in zip(ones, others, strict=False):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            blocks[a.block] = b.block
            is_same = one.sites[a.site] == other.sites[b.site]
            others_block = replace(a, block=b.block, size_bytes=b.size_bytes, site=b.site)
            yield a, b, is_same and others_block == b
        elif isinstance(a, Free) and isinstance(b, Free):
            yield a, b, blocks.get(a.block) == b.block and replace(a, block=b.block) == b
        else:
            yield a, b, isinstance(a, PhaseStart) and a == b


def first_divergence(one: Trace, other: Trace) -> str:
    """Return a description of the first difference between two traces, or "" if they are equal.

    Block and site numbers are ignored.
    """
    for index, (a, b, is_same) in enumerate(match_events(one, one.events, other, other.events)):
        if not is_same or (isinstance(a, Alloc) and isinstance(b, Alloc) and a.size_bytes != b.size_bytes):
            return f"event {index} at batch {one.batch}"
    return "" if len(one.events) == len(other.events) else f"the number of events at batch {one.batch}"
