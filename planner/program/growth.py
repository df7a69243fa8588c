"""Find memory that grows from step to step: what is live at the end of each step.

A loop that has settled holds as much at the end of each step as at the end of the one before; state that the
first step makes, or the second, stays as it is. What grows in every traced step is taken to go on growing.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from planner.program.events import GRAPH_POOL, Alloc, Free, GrowthSource, Phase, PhaseStart, Site, Trace

STREAM_POOL = 32  # streams of one priority, after which torch gives the first again (c10, kStreamsPerPool)
FEWEST_STEPS = 3  # what two steps hold at their ends does not separate state from growth
_ROUND_BYTES = 512  # blocks are multiples of it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class GrowingSite(Struct, frozen=True):
    """Blocks of one module and operator that become more with every step."""

    site: Site
    bytes_per_step: int  # of blocks as the allocator rounds them
    source: GrowthSource | None  # None where the trace does not know it


class Growth(Struct, frozen=True):
    """The memory that each step leaves behind."""

    bytes_per_step: int
    steps: int  # that were traced
    sites: tuple[GrowingSite, ...]  # by falling size
    last_step: int | None = None  # that keeps more, where torch's pool of streams bounds it; None: no end

    @property
    def is_garbage(self) -> bool:
        """Return whether nothing but reference cycles holds it, until Python's garbage collector runs."""
        return all(site.source is not None and site.source.is_garbage for site in self.sites)


def find_growth(trace: Trace) -> Growth | None:
    """Return what grows by every step; None where nothing does, or the steps are too few."""
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
    """Return the step that uses the last stream, where each block lies on a stream that was new for it."""
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
    """Return the blocks that are still there at the end, by site and birth, of those sites that grow."""
    growing = {one.site for one in growth.sites}
    freed = {event.block for event in trace.events if isinstance(event, Free)}
    blocks: dict[Site, list[int]] = {}
    for event in trace.events:
        if isinstance(event, Alloc) and event.block not in freed and trace.sites[event.site] in growing:
            blocks.setdefault(trace.sites[event.site], []).append(event.block)
    return blocks


def _held_at_ends(trace: Trace) -> list[Counter[int]]:
    """Return the bytes that are live at the end of each step, by site, step 1 first."""
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
