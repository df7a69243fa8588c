"""Find memory that grows from step to step.

The live bytes at the ends of the steps are compared. A settled loop holds as much at the end of each step as
at the end of the step before; only the first and the second step may create state that stays. Memory that
grows in every traced step is assumed to keep growing.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from planner.program.events import GRAPH_POOL, Alloc, Free, GrowthSource, Phase, PhaseStart, Site, Trace

STREAM_POOL = 32  # streams per priority, after which torch reuses the first (c10, kStreamsPerPool)
FEWEST_STEPS = 3  # with two steps, state cannot be told from growth
_ROUND_BYTES = 512  # blocks are multiples of it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class GrowingSite(Struct, frozen=True):
    """A module and operator whose live bytes grow with every step, and by how much."""

    site: Site
    bytes_per_step: int  # the sum of blocks rounded up as the allocator rounds them
    source: GrowthSource | None  # None if the trace names no source


class Growth(Struct, frozen=True):
    """The growth of live memory from step to step, in total and by site."""

    bytes_per_step: int
    steps: int  # number of traced steps
    sites: tuple[GrowingSite, ...]  # in descending order of bytes per step
    last_step: int | None = None  # last growing step; None if torch's pool of streams sets no bound

    @property
    def is_garbage(self) -> bool:
        """Return whether all growing memory is held by uncollected reference cycles alone."""
        return all(site.source is not None and site.source.is_garbage for site in self.sites)


def find_growth(trace: Trace) -> Growth | None:
    """Return the memory that grows in every step, or None if none grows or too few steps are traced."""
    ends = _held_at_ends(trace)
    if len(ends) < FEWEST_STEPS:
        return None
    totals = [sum(held.values()) for held in ends]
    if not _rises(totals):
        return None
    sources = {Site(source.module, source.op): source for source in trace.growth_sources}
    sites = [
        GrowingSite(trace.sites[site], ends[-1][site] - ends[-2][site], sources.get(trace.sites[site]))
        for site in ends[-1]
        if _rises([held[site] for held in ends])
    ]
    sites.sort(key=lambda one: -one.bytes_per_step)
    if not sites:
        return None
    growth = Growth(totals[-1] - totals[-2], len(ends), tuple(sites))
    return replace(growth, last_step=_last_step(trace, growth))


def _last_step(trace: Trace, growth: Growth) -> int | None:
    """Return the last step in which memory grows, or None if growth is unbounded.

    torch's pool of streams may bound it. The pool bounds the growth if no two growing blocks of a site share
    a stream, and none of the sites allocates on the default stream alone.
    """
    streams = {event.block: event.stream for event in trace.events if isinstance(event, Alloc)}
    last = growth.steps
    for blocks in growing_blocks(trace, growth).values():
        used = [streams[block] for block in blocks]
        own = len(set(used) - {0, GRAPH_POOL})
        if not own or len(set(used)) != len(used):
            return None
        a_step = -(-own // growth.steps)
        last = max(last, growth.steps + -(-(STREAM_POOL - own) // a_step))
    return last


def growing_blocks(trace: Trace, growth: Growth) -> Mapping[Site, list[int]]:
    """Return, for each growing site, its blocks that are live at the end, in order of allocation."""
    growing = {one.site for one in growth.sites}
    freed = {event.block for event in trace.events if isinstance(event, Free)}
    blocks: dict[Site, list[int]] = {}
    for event in trace.events:
        if isinstance(event, Alloc) and event.block not in freed and trace.sites[event.site] in growing:
            blocks.setdefault(trace.sites[event.site], []).append(event.block)
    return blocks


def _held_at_ends(trace: Trace) -> list[Counter[int]]:
    """Return the rounded live bytes of each site at the end of each step. Steps start at 1."""
    held: Counter[int] = Counter()
    alive: dict[int, tuple[int, int]] = {}
    ends: list[Counter[int]] = []
    step = 0
    for event in trace.events:
        if isinstance(event, Alloc):
            size_bytes = -(-event.size_bytes // _ROUND_BYTES) * _ROUND_BYTES
            alive[event.block] = event.site, size_bytes
            held[event.site] += size_bytes
        elif isinstance(event, Free):
            site, size_bytes = alive.pop(event.block)
            held[site] -= size_bytes
        elif isinstance(event, PhaseStart) and (event.step > step or event.phase is Phase.END):
            if step:
                ends.append(held.copy())
            step = event.step
    return ends


def _rises(levels: list[int]) -> bool:
    return all(before < after for before, after in zip(levels, levels[1:], strict=False))
