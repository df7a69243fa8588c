"""A second allocator simulator, slow and dumb on purpose: it judges the fast one.

It keeps no blocks, no links and no index, and neither splits nor merges. A segment is a set of mapped pages
and a list of what is in use; free blocks are whatever lies between, found anew each time by looking at
everything. It is written from the rules in words, not from the fast code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from planner.allocator.blocks import BlockState, PoolName, SegmentAction, SegmentEvent, SegmentState
from planner.allocator.config import MIB, AllocatorConfig, ReuseOrder


@dataclass(frozen=True)
class Run:
    """A stretch of addresses."""

    address: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


@dataclass(eq=False)
class Segment:
    """Memory of one cudaMalloc (one page as large as itself), or one range of an expandable segment."""

    pool: PoolName
    base: int
    size_bytes: int
    page_bytes: int
    expandable: bool
    mapped_pages: set[int]
    used: dict[int, int] = field(default_factory=dict)  # address -> bytes
    idle_since: int = 0
    stream: int = 0

    def mapped_runs(self) -> list[Run]:
        runs: list[Run] = []
        for page in sorted(self.mapped_pages):
            address = self.base + page * self.page_bytes
            if runs and runs[-1].end == address:
                runs[-1] = Run(runs[-1].address, runs[-1].size_bytes + self.page_bytes)
            else:
                runs.append(Run(address, self.page_bytes))
        return runs

    def blocks(self) -> list[tuple[Run, bool]]:
        """All blocks by address: (where, whether in use)."""
        blocks: list[tuple[Run, bool]] = []
        for mapped in self.mapped_runs():
            position = mapped.address
            for address in sorted(a for a in self.used if mapped.address <= a < mapped.end):
                if address > position:
                    blocks.append((Run(position, address - position), False))
                blocks.append((Run(address, self.used[address]), True))
                position = address + self.used[address]
            if position < mapped.end:
                blocks.append((Run(position, mapped.end - position), False))
        return blocks

    def free_runs(self) -> list[Run]:
        return [run for run, in_use in self.blocks() if not in_use]

    def holes(self) -> list[Run]:
        """Return the parts of an expandable range that are not mapped."""
        holes: list[Run] = []
        position = self.base
        for mapped in self.mapped_runs():
            if mapped.address > position:
                holes.append(Run(position, mapped.address - position))
            position = mapped.end
        if position < self.base + self.size_bytes:
            holes.append(Run(position, self.base + self.size_bytes - position))
        return holes

    def unused_from(self, address: int) -> int:
        """Bytes from `address` to the next block in use, mapped or not."""
        ends = [a for a in self.used if a >= address] + [self.base + self.size_bytes]
        return min(ends) - address


class SlowAllocator:
    """An allocator with `planner.allocator.CachingAllocator`'s interface; blocks are (address, bytes)."""

    def __init__(
        self,
        config: AllocatorConfig,
        capacity_bytes: int | None,
        limit_bytes: int | None,
        total_bytes: int | None,
        address_of: Callable[[int], int],
    ) -> None:
        self.config = config
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = limit_bytes
        self.fails_at_limit = limit_bytes is None and config.throw_on_cudamalloc_oom
        if limit_bytes is None and config.per_process_memory_fraction != 1.0 and total_bytes is not None:
            self.limit_bytes = int(config.per_process_memory_fraction * total_bytes)
        self.total_bytes = total_bytes
        self.address_of = address_of
        self.stream = 0  # of the request that is served
        self.all_segments: list[Segment] = []
        self.events: list[SegmentEvent] = []
        self.retries = 0
        self.ooms = 0
        self.searches = {"small": 0, "large": 0}
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        return sum(sum(segment.used.values()) for segment in self.all_segments)

    @property
    def reserved_bytes(self) -> int:
        return sum(len(segment.mapped_pages) * segment.page_bytes for segment in self.all_segments)

    @property
    def segments(self) -> int:
        return len([segment for segment in self.all_segments if not segment.expandable])

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def malloc(self, requested_bytes: int, stream: int = 0) -> tuple[int, int] | None:
        if requested_bytes == 0:
            return (0, 0)
        size_bytes = rounded(requested_bytes, self.config)
        pool: PoolName = "small" if size_bytes <= 1 * MIB else "large"
        self.stream = stream
        place = self.best_fit(pool, size_bytes) or self.new_memory(pool, size_bytes)
        if place is None:
            return None
        segment, run = place
        rest = run.size_bytes - size_bytes
        if pool == "small" or self.config.expandable_segments:
            splits = rest >= 512
        else:
            may_split = self.config.max_split_bytes is None or size_bytes < self.config.max_split_bytes
            splits = may_split and rest > 1 * MIB
        segment.used[run.address] = size_bytes if splits else run.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return run.address, segment.used[run.address]

    def free(self, address: int) -> None:
        if address == 0:
            return
        (segment,) = [segment for segment in self.all_segments if address in segment.used]
        del segment.used[address]
        if not segment.used:
            segment.idle_since = self.searches[segment.pool]

    def empty_cache(self) -> None:
        self.release_pool("large")
        self.release_pool("small")

    def snapshot(self) -> tuple[SegmentState, ...]:
        states = []
        for segment in self.all_segments:
            for mapped in segment.mapped_runs():
                blocks = [
                    BlockState(run.address, run.size_bytes, in_use)
                    for run, in_use in segment.blocks()
                    if mapped.address <= run.address < mapped.end
                ]
                where = mapped.address, mapped.size_bytes, segment.pool
                states.append(SegmentState(*where, tuple(blocks), segment.stream))
        return tuple(sorted(states, key=lambda state: state.address))

    def free_places(self, pool: PoolName, stream: int | None = None) -> list[tuple[Segment, Run]]:
        """The free blocks of a pool by size, then by the segment's age where that counts, then address, of
        one stream or of all, the streams one after another.
        """
        if stream is None:
            streams = sorted({segment.stream for segment in self.all_segments})
            return [place for one in streams for place in self.free_places(pool, one)]
        segments = [s for s in self.all_segments if s.pool == pool and s.stream == stream]  # the oldest first
        by_age = self.config.reuse_order is ReuseOrder.OLDEST_SEGMENT
        places = [(s, run, age if by_age else 0) for age, s in enumerate(segments) for run in s.free_runs()]
        places.sort(key=lambda place: (place[1].size_bytes, place[2], place[1].address))
        return [(segment, run) for segment, run, _ in places]

    def best_fit(self, pool: PoolName, size_bytes: int) -> tuple[Segment, Run] | None:
        self.searches[pool] += 1
        fitting = [
            place for place in self.free_places(pool, self.stream) if place[1].size_bytes >= size_bytes
        ]
        if not fitting:
            return None
        best = fitting[0]
        if self.config.expandable_segments:
            for other in fitting[1:]:
                if size_with_hole(other) >= size_with_hole(best):
                    break
                best = other
        limit = self.config.max_split_bytes
        if limit is not None:
            fit_bytes = best[1].size_bytes
            if size_bytes < limit <= fit_bytes:
                return None
            if size_bytes >= limit and fit_bytes - size_bytes >= self.config.max_non_split_rounding_bytes:
                return None
        return best

    def new_memory(self, pool: PoolName, size_bytes: int) -> tuple[Segment, Run] | None:
        self.collect_garbage()
        place = self.request_segment(pool, size_bytes)
        if place is not None:
            return place
        if self.fails_at_limit and self.over_limit(size_bytes):
            self.ooms += 1
            return None
        if self.release_oversize(pool, size_bytes):
            place = self.request_segment(pool, size_bytes)
            if place is not None:
                return place
        self.empty_cache()
        self.retries += 1
        place = self.request_segment(pool, size_bytes)
        if place is None:
            self.ooms += 1
        return place

    def over_limit(self, size_bytes: int) -> bool:
        if self.limit_bytes is None:
            return False
        return self.reserved_bytes + segment_size(size_bytes, self.config) > self.limit_bytes

    def over_capacity(self, more_bytes: int) -> bool:
        return self.capacity_bytes is not None and self.reserved_bytes + more_bytes > self.capacity_bytes

    def request_segment(self, pool: PoolName, size_bytes: int) -> tuple[Segment, Run] | None:
        if self.over_limit(size_bytes):
            return None
        if self.config.expandable_segments:
            return self.expand(pool, size_bytes)
        size = segment_size(size_bytes, self.config)
        if self.over_capacity(size):
            return None
        segment = Segment(pool, self.address_of(size), size, size, False, {0}, stream=self.stream)
        self.all_segments.append(segment)
        self.log("segment_alloc", segment.base, size)
        return segment, Run(segment.base, size)

    def expand(self, pool: PoolName, size_bytes: int) -> tuple[Segment, Run] | None:
        segment, start = self.place_to_expand(pool, size_bytes)
        while True:
            mapped = [run.size_bytes for run in segment.free_runs() if run.address == start]
            so_far = mapped[0] if mapped else 0
            if so_far >= size_bytes:
                return segment, Run(start, so_far)
            holes = [hole for hole in segment.holes() if hole.address == start + so_far]
            if not holes:
                return None
            missing = min(size_bytes - so_far, holes[0].size_bytes)
            first = (holes[0].address - segment.base) // segment.page_bytes
            pages = [first]
            while len(pages) * segment.page_bytes < missing:
                pages.append(pages[-1] + 1)
            size = len(pages) * segment.page_bytes
            if self.over_capacity(size):
                return None
            segment.mapped_pages.update(pages)
            self.log("segment_map", holes[0].address, size)

    def place_to_expand(self, pool: PoolName, size_bytes: int) -> tuple[Segment, int]:
        ranges = [s for s in self.all_segments if s.pool == pool and s.stream == self.stream]
        for segment in sorted(ranges, key=lambda segment: segment.base):
            for hole in segment.holes():
                start = hole.address
                for run in segment.free_runs():
                    if run.end == hole.address:
                        start = run.address
                if segment.unused_from(start) >= size_bytes:
                    return segment, start
        page = 2 * MIB if pool == "small" else self.config.large_segment_bytes
        if self.capacity_bytes is None:
            size = 2**47 // page * page
        else:
            total = self.capacity_bytes if self.total_bytes is None else self.total_bytes
            size = page
            while size < total + total // 8:
                size += page
        segment = Segment(pool, self.address_of(size), size, page, True, set(), stream=self.stream)
        self.all_segments.append(segment)
        return segment, segment.base

    def release(self, segment: Segment) -> None:
        assert not segment.used
        self.all_segments.remove(segment)
        self.log("segment_free", segment.base, segment.size_bytes)

    def release_pool(self, pool: PoolName) -> None:
        for segment, run in self.free_places(pool):
            if not segment.expandable:
                if not segment.used:
                    self.release(segment)
                continue
            inside = [
                page
                for page in sorted(segment.mapped_pages)
                if segment.base + page * segment.page_bytes >= run.address
                and segment.base + (page + 1) * segment.page_bytes <= run.end
            ]
            if inside:
                segment.mapped_pages.difference_update(inside)
                size = len(inside) * segment.page_bytes
                self.log("segment_unmap", segment.base + inside[0] * segment.page_bytes, size)
                if not segment.mapped_pages:
                    self.all_segments.remove(segment)

    def release_oversize(self, pool: PoolName, size_bytes: int) -> bool:
        limit = self.config.max_split_bytes
        if limit is None or self.config.expandable_segments:
            return False
        target = max(size_bytes, limit)
        oversize = [place for place in self.free_places(pool, self.stream) if place[1].size_bytes >= limit]
        for segment, run in oversize:
            if run.size_bytes >= target:
                self.release(segment)
                return True
        released = 0
        for segment, run in reversed(oversize):
            if released < target:
                released += run.size_bytes
                self.release(segment)
        return released >= target

    def collect_garbage(self) -> None:
        if self.limit_bytes is None or self.config.garbage_collection_threshold == 0:
            return
        threshold = int(self.config.garbage_collection_threshold * self.limit_bytes)
        to_free = self.reserved_bytes - threshold
        freed = 0
        while freed < to_free:
            places = self.free_places("large")
            idle = [s for s, _ in places if not s.used and not s.expandable]
            ages = {id(s): self.searches["large"] - s.idle_since for s in idle}
            old = [s for s in idle if ages[id(s)] * len(idle) >= sum(ages.values())]
            if not old:
                return
            for segment in old:
                freed += segment.size_bytes
                self.release(segment)

    def log(self, action: SegmentAction, address: int, size_bytes: int) -> None:
        self.events.append(SegmentEvent(action, address, size_bytes))
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def size_with_hole(place: tuple[Segment, Run]) -> int:
    segment, run = place
    return run.size_bytes + sum(hole.size_bytes for hole in segment.holes() if hole.address == run.end)


def rounded(requested_bytes: int, config: AllocatorConfig) -> int:
    size_class = 0
    while size_class < 15 and requested_bytes >= 2 * MIB * 2**size_class:
        size_class += 1
    divisions = config.roundup_power2_divisions[size_class]
    if divisions >= 2 and requested_bytes > 512 * divisions:
        power = 512
        while power * 2 <= requested_bytes:
            power *= 2
        steps = [power + power * k // divisions for k in range(divisions + 1)]
        return min(step for step in steps if step >= requested_bytes)
    while requested_bytes % 512:
        requested_bytes += 1
    return requested_bytes


def segment_size(size_bytes: int, config: AllocatorConfig) -> int:
    if size_bytes <= 1 * MIB:
        return 2 * MIB
    if size_bytes < 10 * MIB:
        return config.large_segment_bytes
    return size_bytes if size_bytes % (2 * MIB) == 0 else (size_bytes // (2 * MIB) + 1) * 2 * MIB
