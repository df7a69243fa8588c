"""Simulate the addresses and reserved bytes of PyTorch's native CUDA caching allocator.

A request is rounded up. The smallest cached block of its pool that is large enough is taken, and split if
enough remains; of equal blocks the one in the oldest segment is taken, or before torch 2.12 the one at the
lowest address. Without such a block a segment is requested from CUDA. If that fails, cached segments that are
wholly free are released and CUDA is tried once more. Freed blocks merge with free neighbours and stay cached.
Each stream has separate pools, whose blocks and segments serve no other stream. A block that other streams
use (`Tensor.record_stream`) is cached when their work is done. The simulator caches it immediately, which no
request can tell from caching at the next request (`process_events`).

Facts: c10/cuda/CUDACachingAllocator.cpp of torch 2.6 to 2.13; methods name the functions that they mirror. A
private pool of CUDA graphs is simulated as a stream with a number of at least `GRAPH_POOL`. Its segments are
never released, and no cached segment is released for it (`captures_underway`). `MemPool`s are not simulated.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from planner.allocator.blocks import Block, BlockPool, SegmentEvent, SegmentState
from planner.allocator.config import (
    BLOCK_ROUNDING_BYTES,
    LARGEST_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNLIMITED,
    AllocatorConfig,
    MemoryLimits,
)
from planner.allocator.segments import Segments
from planner.errors import UsageError
from planner.program import GRAPH_POOL


class CachingAllocator:
    """The simulated caching allocator of one device in one process.

    Attributes to read, in bytes: `allocated_bytes` (full sizes of blocks in use), `reserved_bytes`
    (segments), and their peaks `peak_allocated_bytes`, `peak_reserved_bytes`. Counts: `segments` (torch's
    `segment.all.current`, which omits expandable segments), `retries` (`num_alloc_retries`), `ooms`
    (`num_ooms`).
    """

    def __init__(
        self,
        limits: MemoryLimits = UNLIMITED,
        address_of: Callable[[int], int] | None = None,
        segment_events: list[SegmentEvent] | None = None,
        refuses: Callable[[int], bool] | None = None,
    ) -> None:
        """Create an allocator that has reserved nothing.

        limits: `total_bytes` also sizes the address ranges of expandable segments; if it is None, the
            capacity does.
        address_of: called with the size of each new segment or virtual range, returns its address. By default
            each address is lower than all earlier addresses: published peaks are reproduced if, of equal
            blocks, the one in the newest segment is taken (benchmarks/fits/address_order.py). For a recorded
            history, return the recorded addresses. Since torch 2.12 addresses decide nothing.
        segment_events: a list to which every change of the reserved memory is appended.
        refuses: called with the bytes of a request to CUDA, returns whether CUDA refuses the request. By
            default CUDA refuses a request beyond the capacity.

        Raises UsageError if the configuration limits the memory to a fraction of a total that is not given.
        """
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.retries = 0
        self.ooms = 0
        self._config = config = limits.config
        # The option applies only to the fraction in `config`, not to a limit set by a call
        # (`throw_on_cudamalloc_oom`).
        self._fails_at_limit = config.throw_on_cudamalloc_oom and limits.limit_bytes is None
        self._limit_bytes = limits.process_limit_bytes
        if self._limit_bytes is None and config.per_process_memory_fraction < 1.0:
            raise UsageError("per_process_memory_fraction is of the GPU's memory; give that to the replay")
        self._segments = Segments(limits, address_of, segment_events, refuses)
        self._small, self._large = _make_pools(config)
        self._of_streams: dict[int, tuple[BlockPool, BlockPool]] = {0: (self._small, self._large)}
        self._oversize_bytes = sys.maxsize if config.max_split_bytes is None else config.max_split_bytes
        self._collects_garbage = config.garbage_collection_threshold > 0 and self._limit_bytes is not None
        self._searches = {"small": 0, "large": 0}  # numbers of searches, for the ages of blocks
        self._rounds_to_512 = max(config.roundup_power2_divisions) <= 1
        self._searches_plainly = not (
            config.expandable_segments or config.max_split_bytes is not None or self._collects_garbage
        )

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of all segments and mapped pages that are reserved from CUDA now."""
        return self._segments.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the most bytes reserved at once since the start or the last `reset_peaks`."""
        return self._segments.peak_reserved_bytes

    @property
    def segments(self) -> int:
        """Return the number of segments that are not expandable."""
        return self._segments.count

    def hold(self, start: Iterable[SegmentState]) -> dict[int, Block]:
        """Add the reserved memory `start` to an empty allocator, and return the blocks in use by address.

        The segments count as requested in order of address. Raises ValueError if the allocator already has
        memory.
        """
        if self._segments.heads:
            raise ValueError("the allocator already has memory")
        used: dict[int, Block] = {}
        for state in sorted(start, key=lambda state: state.address):
            small, large = self._pools_of(state.stream)
            for block in self._segments.hold(state, small if state.pool == "small" else large):
                used[block.address] = block
                self.allocated_bytes += block.size_bytes
        self.reset_peaks()
        return used

    def ranges(self) -> list[tuple[int, int]]:
        """Return the start and end address of each expandable segment's virtual range."""
        return self._segments.ranges()

    def missing_bytes(self, requested_bytes: int, stream: int = 0) -> int:
        """Return the size of the new segment that a request would need, or 0 if a cached block serves it."""
        size_bytes = self._config.block_bytes(requested_bytes)
        pool = self._pools_of(stream)[size_bytes > LARGEST_SMALL_BYTES]
        served = self._search(pool, size_bytes) < len(pool.cached)
        return 0 if served else self._config.segment_bytes(size_bytes)

    def malloc(self, requested_bytes: int, stream: int = 0) -> Block | None:
        """Allocate a block of at least `requested_bytes`, or return None if the memory is exhausted.

        `stream` is an arbitrary number; 0 is the default stream. As in torch, zero bytes take no memory and
        change nothing: they get an empty block at address 0, which `free` accepts any number of times. Raises
        ValueError for a negative size.
        """
        if requested_bytes <= 0:
            return self._malloc_nothing(requested_bytes)
        if self._rounds_to_512:
            size_bytes = (requested_bytes + BLOCK_ROUNDING_BYTES - 1) & -BLOCK_ROUNDING_BYTES
        else:
            size_bytes = self._config.block_bytes(requested_bytes)
        small, large = (self._small, self._large) if stream == 0 else self._pools_of(stream)
        pool = small if size_bytes <= LARGEST_SMALL_BYTES else large
        cached = pool.cached
        if self._searches_plainly:
            place = bisect_left(cached, (size_bytes,))
        else:
            place = self._search(pool, size_bytes)
        if place < len(cached):
            block = cached.pop(place)[2]
            block.cached = False
        else:
            reserved = self._reserve(pool, size_bytes)
            if reserved is None:
                return None
            block = reserved
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= pool.split_from_bytes and size_bytes < pool.split_below_bytes:  # `should_split`
            rest = block.split_off(size_bytes)
            rest.cached = True
            insort(cached, (rest_bytes, rest.rank, rest))
        block.in_use = True
        allocated_bytes = self.allocated_bytes = self.allocated_bytes + block.size_bytes
        if allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Free a block: merge it with cached neighbours, and keep it cached (`free_block`).

        The block must not be used afterwards. Raises ValueError for a block that is not in use.
        """
        if not block.in_use:
            self._free_nothing(block)
            return
        self.allocated_bytes -= block.size_bytes
        block.in_use = False
        pool = block.pool
        cached = pool.cached
        # BlockPool.remove and BlockPool.insert are inlined here: this is half of the hot loop.
        upper = block.next
        if upper is not None and upper.cached:
            del cached[bisect_left(cached, (upper.size_bytes, upper.rank))]
            block.absorb(upper)
        lower = block.prev
        if lower is not None and lower.cached:
            del cached[bisect_left(cached, (lower.size_bytes, lower.rank))]
            lower.absorb(block)
            block = lower
        block.cached = True
        if self._collects_garbage:
            block.freed_at_search = self._searches[pool.name]
        insort(cached, (block.size_bytes, block.rank, block))

    def empty_cache(self) -> None:
        """Release wholly free segments, and free pages of expandable segments, to CUDA.

        Memory of graph pools stays reserved.
        """
        for turn in (1, 0):  # large, then small
            for stream in sorted(stream for stream in self._of_streams if stream < GRAPH_POOL):
                self._segments.release_pool(self._of_streams[stream][turn])

    def reset_peaks(self) -> None:
        """Reset both peaks to the current levels."""
        self.peak_allocated_bytes = self.allocated_bytes
        self._segments.peak_reserved_bytes = self._segments.reserved_bytes

    def snapshot(self) -> tuple[SegmentState, ...]:
        """Return the state of each contiguous piece of reserved memory, in ascending order of address."""
        return self._segments.picture()

    def copy(
        self, segment_events: list[SegmentEvent] | None = None
    ) -> tuple["CachingAllocator", dict[int, Block]]:
        """Return a copy of the allocator, and the copies of its blocks by the `id` of the original blocks.

        segment_events: a list to which every change of the copy's reserved memory is appended.
        """
        twin = object.__new__(CachingAllocator)
        twin.__dict__.update(self.__dict__)
        twin._of_streams = {
            stream: (small.of_stream(stream), large.of_stream(stream))
            for stream, (small, large) in self._of_streams.items()
        }
        twin._small, twin._large = twin._of_streams[0]
        pairs = [
            pair
            for stream, pools in self._of_streams.items()
            for pair in zip(pools, twin._of_streams[stream], strict=True)
        ]
        twin._segments, blocks = self._segments.copy({id(old): new for old, new in pairs}, segment_events)
        for old, new in pairs:
            new.cached = [(size, rank, blocks[id(block)]) for size, rank, block in old.cached]
            new.unmapped = [blocks[id(block)] for block in old.unmapped]
        twin._searches = dict(self._searches)
        return twin, blocks

    def _pools_of(self, stream: int) -> tuple[BlockPool, BlockPool]:
        if stream not in self._of_streams:
            self._of_streams[stream] = self._small.of_stream(stream), self._large.of_stream(stream)
        return self._of_streams[stream]

    def _malloc_nothing(self, requested_bytes: int) -> Block:
        if requested_bytes < 0:
            raise ValueError(f"cannot allocate {requested_bytes} bytes")
        return Block(self._small, address=0, rank=0, size_bytes=0)

    def _free_nothing(self, block: Block) -> None:
        if block.size_bytes > 0:
            raise ValueError(f"the block at {block.address:#x} is not in use: freed twice?")

    def _search(self, pool: BlockPool, size_bytes: int) -> int:
        """Return the index in `pool.cached` of the block that serves a request, or its length if none fits.

        The method mirrors `get_free_block`.
        """
        cached = pool.cached
        if self._collects_garbage:
            self._searches[pool.name] += 1
        place = bisect_left(cached, (size_bytes,))
        if place == len(cached):
            return place
        if self._config.expandable_segments:
            # The size includes the unmapped space after the block: a segment's growing end is used last.
            max_reserved_bytes = _growable_bytes(cached[place][2])
            while place + 1 < len(cached) and _growable_bytes(cached[place + 1][2]) < max_reserved_bytes:
                place += 1
                max_reserved_bytes = _growable_bytes(cached[place][2])
        block_bytes = cached[place][0]
        if size_bytes < self._oversize_bytes:
            fits = block_bytes < self._oversize_bytes
        else:
            fits = block_bytes < size_bytes + self._config.max_non_split_rounding_bytes
        return place if fits else len(cached)

    def _reserve(self, pool: BlockPool, size_bytes: int) -> Block | None:
        """Request memory from CUDA, and return it as a block, or None if the request fails.

        If CUDA refuses, cached memory is released and the request is repeated, but not for a graph pool, and
        not at the memory limit with `throw_on_cudamalloc_oom`. The method mirrors the second half of
        `malloc`, and counts retries and out-of-memory failures.
        """
        if self._collects_garbage:
            self._collect_garbage()
        segment_bytes = self._config.segment_bytes(size_bytes)
        block = self._segments.request_segment(pool, size_bytes, segment_bytes)
        if block is not None:
            return block
        if self._fails_at_limit and self._segments.exceeds_limit(segment_bytes):
            self.ooms += 1
            return None
        if self._release_oversize(pool, size_bytes):
            block = self._segments.request_segment(pool, size_bytes, segment_bytes)
        if block is None and pool.stream < GRAPH_POOL:
            self.empty_cache()
            self.retries += 1
            block = self._segments.request_segment(pool, size_bytes, segment_bytes)
        if block is None:
            self.ooms += 1
        return block

    def _release_oversize(self, pool: BlockPool, size_bytes: int) -> bool:
        """Release cached unsplittable blocks, and return whether enough memory was released.

        The smallest block that is large enough is released; without such a block, blocks are
        released in descending order of size (`release_available_cached_blocks`).
        """
        if self._config.max_split_bytes is None or self._config.expandable_segments:
            return False
        needed_bytes = max(size_bytes, self._oversize_bytes)
        cached = pool.cached
        place = bisect_left(cached, (needed_bytes,))
        if place < len(cached):
            self._segments.release(cached[place][2])
            return True
        released_bytes = 0
        while cached and released_bytes < needed_bytes and cached[-1][0] >= self._oversize_bytes:
            released_bytes += cached[-1][0]
            self._segments.release(cached[-1][2])
        return released_bytes >= needed_bytes

    def _collect_garbage(self) -> None:
        """Release large cached segments that were unused for long.

        Nothing is released below the garbage collection threshold.
        """
        assert self._limit_bytes is not None
        threshold_bytes = int(self._config.garbage_collection_threshold * self._limit_bytes)
        excess_bytes = self.reserved_bytes - threshold_bytes
        pools = [self._of_streams[stream][1] for stream in sorted(self._of_streams)]
        cached = [block for pool in pools for _, _, block in pool.cached]
        idle = [block for block in cached if not block.is_split and block.range_address is None]
        searches = self._searches["large"]
        released_bytes = 0
        while idle and released_bytes < excess_bytes:
            mean_age = sum(searches - block.freed_at_search for block in idle) / len(idle)
            for block in idle:
                if searches - block.freed_at_search >= mean_age:
                    released_bytes += block.size_bytes
                    self._segments.release(block)
            idle = [block for block in idle if block.cached]


def _make_pools(config: AllocatorConfig) -> tuple[BlockPool, BlockPool]:
    never = sys.maxsize
    small = BlockPool("small", SMALL_SEGMENT_BYTES, BLOCK_ROUNDING_BYTES, never)
    if config.expandable_segments:
        return small, BlockPool("large", config.large_segment_bytes, BLOCK_ROUNDING_BYTES, never)
    below_bytes = never if config.max_split_bytes is None else config.max_split_bytes
    return small, BlockPool("large", config.large_segment_bytes, LARGEST_SMALL_BYTES + 1, below_bytes)


def _growable_bytes(block: Block) -> int:
    """Return the total size of a cached block and, if the next block is unmapped, of the next block."""
    upper = block.next
    if upper is None or upper.in_use:  # it cannot be cached, or the two would have merged
        return block.size_bytes
    return block.size_bytes + upper.size_bytes
