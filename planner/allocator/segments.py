"""The memory that an allocator has reserved: segments and virtual address ranges.

The memory is requested from CUDA and returned to CUDA. CUDA refuses a request beyond the capacity; the limit
is checked before CUDA is called. `CachingAllocator` decides which cached segments are released, and when.

Facts: c10/cuda/CUDACachingAllocator.cpp of torch 2.6 to 2.13; methods name the functions that they mirror.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

from planner.allocator.blocks import (
    Block,
    BlockPool,
    SegmentAction,
    SegmentEvent,
    SegmentState,
    iterate_segment,
)
from planner.allocator.config import MemoryLimits, ReuseOrder
from planner.allocator.expandable_segments import find_free_range, grow, range_bytes, shrink

TOP_ADDRESS = 2**52  # simulated segments lie below it; address 0 means no memory
UNLIMITED_RANGE_BYTES = 2**47  # address range of an expandable segment if the capacity is unlimited
SEGMENT_RANK = 2**64  # difference of the ranks of two segments; larger than all addresses


class Segments:
    """All segments of one simulated allocator.

    Plain attributes to read: `reserved_bytes` and its peak `peak_reserved_bytes`; `count`, the number of
    segments that are not expandable; `heads`, the lowest block of each segment and virtual range by address.
    """

    def __init__(
        self,
        limits: MemoryLimits,
        address_of: Callable[[int], int] | None,
        events: list[SegmentEvent] | None,
        refuses: Callable[[int], bool] | None,
    ) -> None:
        """Create an empty set of segments. The parameters are as for `CachingAllocator`."""
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.count = 0
        self.heads: dict[int, Block] = {}
        self.lowest_address = TOP_ADDRESS
        self._expandable = limits.config.expandable_segments
        # Distance between the ranks of consecutive segments; 0 if only addresses count.
        self._rank_step = SEGMENT_RANK if limits.config.reuse_order is ReuseOrder.OLDEST_SEGMENT else 0
        self._first_rank = 0
        self._limits = limits
        self._limit_bytes = limits.process_limit_bytes
        self._address_of = address_of
        self._events = events
        self._refuses = refuses

    def copy(
        self, pools: Mapping[int, BlockPool], events: list[SegmentEvent] | None
    ) -> tuple["Segments", dict[int, Block]]:
        """Return a copy of the segments, and the copies of their blocks by the `id` of the original blocks.

        `pools` maps the `id` of each original pool to the pool of the copied blocks.
        """
        twin = object.__new__(Segments)
        twin.__dict__.update(self.__dict__)
        twin._events, twin.heads = events, {}
        blocks: dict[int, Block] = {}
        for address, head in self.heads.items():
            lower: Block | None = None
            for block in iterate_segment(head):
                own = Block(
                    pools[id(block.pool)],
                    block.address,
                    block.rank,
                    block.size_bytes,
                    lower,
                    None,
                    block.range_address,
                )
                own.in_use, own.cached = block.in_use, block.cached
                own.freed_at_search = block.freed_at_search
                if lower is None:
                    twin.heads[address] = own
                else:
                    lower.next = own
                blocks[id(block)] = lower = own
        return twin, blocks

    def exceeds_limit(self, segment_bytes: int) -> bool:
        """Return whether a new segment of `segment_bytes` would exceed the process's memory limit."""
        limit_bytes = self._limit_bytes
        return limit_bytes is not None and self.reserved_bytes + segment_bytes > limit_bytes

    def request_segment(self, pool: BlockPool, size_bytes: int, segment_bytes: int) -> Block | None:
        """Request memory from CUDA as an uncached block, or return None if CUDA or the limit refuses it.

        The method mirrors `alloc_block`. The limit is compared with the segment's size even if an expandable
        segment grows by more or less.
        """
        if self.exceeds_limit(segment_bytes):
            return None
        if self._expandable:
            start = find_free_range(pool, size_bytes) or self._new_range(pool)
            grown = grow(start, size_bytes, self._map_pages)
            if grown is not None:
                pool.remove(grown)
            return grown
        if self._is_refused(segment_bytes):
            return None
        address = self._new_address(segment_bytes)
        block = Block(pool, address, self._new_rank(address), segment_bytes)
        self.heads[block.address] = block
        self.count += 1
        self._change_reserved("segment_alloc", block.address, segment_bytes)
        return block

    def release(self, block: Block) -> None:
        """Release to CUDA the segment that consists of a cached block alone. Mirrors `release_block`."""
        block.pool.remove(block)
        del self.heads[block.address]
        self.count -= 1
        self._change_reserved("segment_free", block.address, block.size_bytes)

    def release_pool(self, pool: BlockPool) -> None:
        """Release a pool's free segments and pages to CUDA.

        They are released in order of size and rank (`release_blocks`).
        """
        for _, _, block in tuple(pool.cached):
            if block.range_address is not None:
                emptied = shrink(block, self._unmap_pages)
                if emptied is not None:
                    pool.unmapped.remove(emptied)
                    del self.heads[emptied.address]
            elif not block.is_split:
                self.release(block)

    def picture(self) -> tuple[SegmentState, ...]:
        """Return the state of each contiguous piece of reserved memory, in ascending order of address."""
        pieces = []
        for address in sorted(self.heads):
            chain = iterate_segment(self.heads[address])
            for is_mapped, run in groupby(chain, key=lambda block: block.in_use or block.cached):
                if is_mapped:
                    pieces.append(SegmentState.of(tuple(run)))
        return tuple(pieces)

    def hold(self, state: SegmentState, pool: BlockPool) -> Iterator[Block]:
        """Add the memory of a state to the segments, and yield the blocks in use.

        States must come in ascending order of address. An expandable segment begins at its lowest added page.
        """
        if self._expandable:
            piece = self._hold_pages(state, pool)
        else:
            piece = Block(pool, state.address, self._new_rank(state.address), state.size_bytes)
            self.heads[state.address] = piece
            self.count += 1
        self.reserved_bytes += state.size_bytes
        for block in state.blocks:
            rest = piece.split_off(block.size_bytes) if block.size_bytes < piece.size_bytes else piece
            if block.in_use:
                piece.in_use = True
                yield piece
            else:
                pool.insert(piece)
            piece = rest

    def ranges(self) -> list[tuple[int, int]]:
        """Return the start and end address of each expandable segment's virtual range."""
        heads = [head for head in self.heads.values() if head.range_address is not None]
        return [
            (head.address, head.address + sum(one.size_bytes for one in iterate_segment(head)))
            for head in heads
        ]

    def _hold_pages(self, state: SegmentState, pool: BlockPool) -> Block:
        """Split the pages of a state from a virtual range; return them as one block, not cached or in use."""
        ends = [
            one for one in pool.unmapped if one.next is None and one.address + one.size_bytes > state.address
        ]
        gap = ends[0] if ends else self._new_range(pool, state.address)
        if gap.address < state.address:
            piece = gap.split_off(state.address - gap.address)
        else:
            pool.unmapped.remove(gap)
            piece = gap
        if state.size_bytes < piece.size_bytes:
            pool.insert_unmapped(piece.split_off(state.size_bytes))
        return piece

    def _is_refused(self, size_bytes: int) -> bool:
        if self._refuses is not None:
            return self._refuses(size_bytes)
        capacity_bytes = self._limits.capacity_bytes
        return capacity_bytes is not None and self.reserved_bytes + size_bytes > capacity_bytes

    def _new_range(self, pool: BlockPool, address: int | None = None) -> Block:
        if self._limits.capacity_bytes is None:
            size_bytes = UNLIMITED_RANGE_BYTES // pool.page_bytes * pool.page_bytes
        else:
            size_bytes = range_bytes(self._limits.total_bytes or self._limits.capacity_bytes, pool.page_bytes)
        address = self._new_address(size_bytes) if address is None else address
        rank = self._new_rank(address)
        block = Block(pool, address, rank, size_bytes, range_address=address)
        self.heads[address] = block
        pool.insert_unmapped(block)
        return block

    def _new_address(self, size_bytes: int) -> int:
        if self._address_of is not None:
            return self._address_of(size_bytes)
        self.lowest_address -= size_bytes
        return self.lowest_address

    def _new_rank(self, address: int) -> int:
        """Return the rank of a new segment or virtual range, for the order among free blocks of equal size.

        Source: `Block::registration_counter`.
        """
        self._first_rank += self._rank_step
        return self._first_rank + address

    def _map_pages(self, address: int, size_bytes: int) -> bool:
        if self._is_refused(size_bytes):
            return False
        self._change_reserved("segment_map", address, size_bytes)
        return True

    def _unmap_pages(self, address: int, size_bytes: int) -> None:
        self._change_reserved("segment_unmap", address, size_bytes)

    def _change_reserved(self, action: SegmentAction, address: int, size_bytes: int) -> None:
        if action in ("segment_alloc", "segment_map"):
            self.reserved_bytes += size_bytes
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        else:
            self.reserved_bytes -= size_bytes
        if self._events is not None:
            self._events.append(SegmentEvent(action, address, size_bytes))
