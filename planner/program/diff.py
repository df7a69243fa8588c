"""The first event at which two traces of one batch size diverge."""

from planner.program.events import Alloc, Free, PhaseStart, Trace


def first_divergence(one: Trace, other: Trace) -> str:
    """Return where two traces diverge apart from the numbers of blocks; "" where they do not."""
    blocks: dict[int, int] = {}
    for index, (a, b) in enumerate(zip(one.events, other.events, strict=False)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            same = (a.size_bytes, a.category, a.may_fail) == (b.size_bytes, b.category, b.may_fail)
            same = same and one.sites[a.site] == other.sites[b.site]
            blocks[a.block] = b.block
        elif isinstance(a, Free) and isinstance(b, Free):
            same = blocks.get(a.block) == b.block
        else:
            same = isinstance(a, PhaseStart) and a == b
        if not same:
            return f"event {index} at batch {one.batch}"
    return "" if len(one.events) == len(other.events) else f"the number of events at batch {one.batch}"
