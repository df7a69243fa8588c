"""Expandable segments: virtual address ranges whose pages are mapped when needed.

Pages are unmapped when they are wholly free. Facts: c10/cuda/CUDACachingAllocator.cpp (`ExpandableSegment`,
`find_expandable_block`, `map_block`, `try_allocate_expandable_block`, `unmap_block`). A page is 2 MiB in the
small pool and one large segment (20 MiB by default) in the large pool. Unmapped blocks start and end on
pages, counted from the range's start.
"""

from collections.abc import Callable
from itertools import accumulate, takewhile

from planner.allocator.blocks import Block, BlockPool, iterate_segment
from planner.allocator.config import round_up


def range_bytes(device_total_bytes: int, page_bytes: int) -> int:
    """Return the size of an expandable segment's address range: 9/8 of the device's memory in whole pages."""
    return max(page_bytes, round_up(device_total_bytes + device_total_bytes // 8, page_bytes))


def find_free_range(pool: BlockPool, size_bytes: int) -> Block | None:
    """Return the first of adjacent free blocks that have `size_bytes` together, or None if there are none.

    The run of free blocks with the lowest address is taken. Free blocks are cached or unmapped. A run is
    large enough if it has `size_bytes`. It must begin with an unmapped block, or with a cached block before
    an unmapped block.
    """
    for gap in pool.unmapped:
        start = gap.prev if gap.prev is not None and gap.prev.cached else gap
        free = takewhile(lambda block: not block.in_use, iterate_segment(start))
        if any(free_bytes >= size_bytes for free_bytes in accumulate(block.size_bytes for block in free)):
            return start
    return None


def grow(start: Block, size_bytes: int, map_pages: Callable[[int, int], bool]) -> Block | None:
    """Map pages until the free block at `start` has `size_bytes`; return the block, or None if that fails.

    `map_pages(address, size_bytes)` maps the memory or returns False. Pages that were mapped before a
    refusal stay cached.
    """
    block: Block | None = start
    if not start.cached:
        block = _map(start, min(start.size_bytes, size_bytes), map_pages)
    while block is not None and block.size_bytes < size_bytes:
        gap = block.next
        if gap is None:  # the end of the range, which no device can fill
            return None
        block = _map(gap, min(gap.size_bytes, size_bytes - block.size_bytes), map_pages)
    return block


def shrink(block: Block, unmap_pages: Callable[[int, int], None]) -> Block | None:
    """Unmap all whole pages in a cached block; return the unmapped block if it is the whole range, else None.

    `unmap_pages(address, size_bytes)` releases the pages. None is returned if other pages of the range are
    still mapped, or the block has no whole page.
    """
    assert block.range_address is not None
    pool = block.pool
    base = block.range_address
    first = base + round_up(block.address - base, pool.page_bytes)
    end = base + (block.address + block.size_bytes - base) // pool.page_bytes * pool.page_bytes
    if first >= end:
        return None
    pool.remove(block)
    gap = block
    if block.address < first:
        gap = block.split_off(first - block.address)
        pool.insert(block)
    if end < gap.address + gap.size_bytes:
        pool.insert(gap.split_off(end - first))
    unmap_pages(first, end - first)
    return _insert_gap(gap)


def _insert_gap(gap: Block) -> Block | None:
    """Merge an unmapped block with unmapped neighbours; return it if it is the whole range, else None."""
    pool = gap.pool
    if gap.next is not None and _is_unmapped(gap.next):
        pool.unmapped.remove(gap.next)
        gap.absorb(gap.next)
    if gap.prev is not None and _is_unmapped(gap.prev):
        gap.prev.absorb(gap)
        gap = gap.prev
    else:
        pool.insert_unmapped(gap)
    return None if gap.is_split else gap


def _map(gap: Block, size_bytes: int, map_pages: Callable[[int, int], bool]) -> Block | None:
    """Map the first pages of an unmapped block, and return them as a cached block, or None if it fails.

    The pages are merged with cached neighbours.
    """
    pool = gap.pool
    mapped_bytes = round_up(size_bytes, pool.page_bytes)
    if not map_pages(gap.address, mapped_bytes):
        return None
    pool.unmapped.remove(gap)
    if mapped_bytes < gap.size_bytes:
        pool.insert_unmapped(gap.split_off(mapped_bytes))
    block = gap
    if gap.prev is not None and gap.prev.cached:
        block = gap.prev
        pool.remove(block)
        block.absorb(gap)
    if block.next is not None and block.next.cached:
        pool.remove(block.next)
        block.absorb(block.next)
    pool.insert(block)
    return block


def _is_unmapped(block: Block) -> bool:
    return not block.cached and not block.in_use
