"""Blocks of the allocator simulator: sizes, splits, merges and reuse, each history worked out by hand."""

import pytest

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import AllocatorConfig, MemoryLimits, config_of_torch
from planner.program import GRAPH_POOL
from tests.helpers.allocator_steps import Result, Step, alloc, mib, replay

# Rounding, segments, splitting


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, mib(2)),
        (512, 512, mib(2)),
        (513, 1024, mib(2)),
        (mib(1) - 1, mib(1), mib(2)),
        (mib(1), mib(1), mib(2)),
        (mib(1) + 1, mib(1) + 512, mib(20)),
        (mib(10) - 512, mib(10) - 512, mib(20)),
        (mib(10) - 511, mib(10), mib(10)),
        (mib(10), mib(10), mib(10)),
        (mib(10) + 1, mib(10) + 512, mib(12)),
        (mib(12), mib(12), mib(12)),
    ],
)
def test_size_of_block_and_segment(requested: int, block: int, segment: int) -> None:
    """Blocks are multiples of 512 bytes; segments hold 2 MiB, 20 MiB, or the block rounded up to 2 MiB."""
    assert replay(("a", requested)) == Result(
        placed={"a": (0, block)},
        events=[("segment_alloc", 0, segment)],
        allocated=block,
        reserved=segment,
        peaks=(block, segment),
    )


def test_a_block_that_is_not_split_counts_whole() -> None:
    """A request of 73.5 MiB in a segment of 74 MiB counts 74 MiB allocated, as measured by the seed."""
    assert replay(("a", mib(73.5))) == Result(
        placed={"a": (0, mib(74))},
        events=[alloc(0, 74)],
        allocated=mib(74),
        reserved=mib(74),
        peaks=(mib(74), mib(74)),
    )


def test_large_remainder_of_one_mebibyte_is_not_split() -> None:
    """In the large pool a remainder of exactly 1 MiB stays with the block, 512 bytes more are split off."""
    assert replay(("whole", mib(11)), ("split", mib(11) - 512)) == Result(
        placed={"whole": (0, mib(12)), "split": (mib(12), mib(11) - 512)},
        events=[alloc(0, 12), alloc(12, 12)],
        allocated=mib(23) - 512,
        reserved=mib(24),
        peaks=(mib(23) - 512, mib(24)),
    )


def test_small_remainder_of_512_bytes_is_split() -> None:
    """In the small pool a remainder of exactly 512 bytes is a block of its own."""
    assert replay(("a", mib(1)), ("b", mib(1) - 512), ("c", 1), ("d", 1)) == Result(
        placed={"a": (0, mib(1)), "b": (mib(1), mib(1) - 512), "c": (mib(2) - 512, 512), "d": (mib(2), 512)},
        events=[alloc(0, 2), alloc(2, 2)],
        allocated=mib(2) + 512,
        reserved=mib(4),
        peaks=(mib(2) + 512, mib(4)),
    )


def test_zero_bytes_take_no_memory() -> None:
    """A request of zero bytes succeeds, changes nothing, and may be freed, even twice."""
    allocator = CachingAllocator(MemoryLimits(0))
    block = allocator.malloc(0)
    assert block is not None
    allocator.free(block)
    allocator.free(block)
    assert (block.address, block.size_bytes, block.in_use) == (0, 0, False)
    assert (allocator.snapshot(), allocator.peak_reserved_bytes, allocator.retries) == ((), 0, 0)


def test_a_negative_size_is_refused() -> None:
    """A negative request is a mistake of the caller, not an allocation."""
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        CachingAllocator().malloc(-1)


def test_a_block_freed_twice_is_refused() -> None:
    """Freeing a block that is not in use is a mistake of the caller, also when it has merged since."""
    allocator = CachingAllocator()
    lower, upper = allocator.malloc(512), allocator.malloc(512)
    assert lower is not None and upper is not None
    allocator.free(lower)
    allocator.free(upper)
    for block in (lower, upper):
        with pytest.raises(ValueError, match="not in use: freed twice"):
            allocator.free(block)


# Choosing and merging blocks


def test_best_fit_takes_the_smallest_block_and_the_lowest_address() -> None:
    """The smallest cached block that is large enough serves, the lowest of equal ones."""
    history: list[Step] = [("a", mib(16)), ("b", mib(14)), ("c", mib(12)), ("d", mib(14))]
    history += ["-d", "-c", "-b", "-a"]
    assert replay(*history, ("e", mib(13)), ("f", mib(13.5)), ("g", mib(14))) == Result(
        placed={
            "a": (0, mib(16)),
            "b": (mib(16), mib(14)),
            "c": (mib(30), mib(12)),
            "d": (mib(42), mib(14)),
            "e": (mib(16), mib(14)),
            "f": (mib(42), mib(14)),
            "g": (0, mib(14)),
        },
        events=[alloc(0, 16), alloc(16, 14), alloc(30, 12), alloc(42, 14)],
        allocated=mib(42),
        reserved=mib(56),
        peaks=(mib(56), mib(56)),
    )


TORCH_2_11, TORCH_2_12 = config_of_torch("2.11.0+cu130"), config_of_torch("2.12.0+cu130")


@pytest.mark.parametrize(("config", "reused"), [(TORCH_2_11, "newer"), (TORCH_2_12, "older")])
def test_of_equal_blocks_torch_2_12_reuses_the_oldest_segment(config: AllocatorConfig, reused: str) -> None:
    """New segments lie below older ones, so that the lowest address, reused before 2.12, is the newest's."""
    allocator = CachingAllocator(MemoryLimits(config=config))
    older, newer = allocator.malloc(mib(30)), allocator.malloc(mib(30))
    assert older is not None and newer is not None
    assert newer.address + mib(30) == older.address
    places = {"older": older.address, "newer": newer.address}
    allocator.free(older)
    allocator.free(newer)
    block = allocator.malloc(mib(30))
    assert block is not None and block.address == places[reused]


@pytest.mark.parametrize("config", [TORCH_2_11, TORCH_2_12])
def test_of_equal_blocks_in_one_segment_the_lowest_is_reused(config: AllocatorConfig) -> None:
    """Blocks of a segment share its age, so that their addresses decide in all versions."""
    allocator = CachingAllocator(MemoryLimits(config=config))
    blocks = [allocator.malloc(mib(4)) for _ in range(5)]
    lower, upper = blocks[1], blocks[3]
    assert lower is not None and upper is not None
    place = lower.address
    allocator.free(upper)
    allocator.free(lower)
    block = allocator.malloc(mib(4))
    assert block is not None and block.address == place


@pytest.mark.parametrize(("config", "reused"), [(TORCH_2_11, mib(100)), (TORCH_2_12, mib(800))])
def test_addresses_may_be_dictated(config: AllocatorConfig, reused: int) -> None:
    """With recorded addresses ties go to the lowest, or from torch 2.12 on to the oldest segment."""
    recorded = iter([mib(800), mib(100)])
    sizes = []

    def address_of(size_bytes: int) -> int:
        sizes.append(size_bytes)
        return next(recorded)

    allocator = CachingAllocator(MemoryLimits(config=config), address_of=address_of)
    first, second = allocator.malloc(mib(30)), allocator.malloc(mib(29.5))
    assert first is not None and second is not None
    assert (sizes, first.address, second.address) == ([mib(30), mib(30)], mib(800), mib(100))
    allocator.free(second)
    allocator.free(first)
    block = allocator.malloc(mib(30))
    assert block is not None and block.address == reused


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_free_neighbours_merge(order: str) -> None:
    """In whatever order the three blocks of a segment are freed, they end as one block of 20 MiB."""
    history: list[Step] = [("a", mib(2)), ("b", mib(5)), ("c", mib(9)), *(f"-{name}" for name in order)]
    assert replay(*history, ("whole", mib(20))) == Result(
        placed={"a": (0, mib(2)), "b": (mib(2), mib(5)), "c": (mib(7), mib(9)), "whole": (0, mib(20))},
        events=[alloc(0, 20)],
        allocated=mib(20),
        reserved=mib(20),
        peaks=(mib(20), mib(20)),
    )


def test_blocks_of_different_segments_do_not_merge() -> None:
    """Two free segments side by side stay two: a request of both sizes together needs a third."""
    assert replay(("a", mib(10)), ("b", mib(10)), "-a", "-b", ("c", mib(20))) == Result(
        placed={"a": (0, mib(10)), "b": (mib(10), mib(10)), "c": (mib(20), mib(20))},
        events=[alloc(0, 10), alloc(10, 10), alloc(20, 20)],
        allocated=mib(20),
        reserved=mib(40),
        peaks=(mib(20), mib(40)),
    )


def test_small_and_large_requests_share_no_segment() -> None:
    """A request of 1 MiB does not use a cached large segment, nor 512 bytes more a small one."""
    history: list[Step] = [("large", mib(5)), ("small", 512), "-large", "-small"]
    assert replay(*history, ("a", mib(1)), ("b", mib(1) + 512), "-a", ("c", mib(1) + 1)) == Result(
        placed={
            "large": (0, mib(5)),
            "small": (mib(20), 512),
            "a": (mib(20), mib(1)),
            "b": (0, mib(1) + 512),
            "c": (mib(1) + 512, mib(1) + 512),
        },
        events=[alloc(0, 20), alloc(20, 2)],
        allocated=mib(2) + 1024,
        reserved=mib(22),
        peaks=(mib(5) + 512, mib(22)),
    )


def test_private_blocks_share_no_segment_with_others() -> None:
    """A block of CUDA graphs takes a segment of their own, though another one is cached."""
    allocator = CachingAllocator()
    allocator.free(_block(allocator, 20 * 2**20))
    allocator.free(_block(allocator, 20 * 2**20, GRAPH_POOL))
    assert allocator.reserved_bytes == 40 * 2**20
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * 2**20
    assert allocator.malloc(20 * 2**20, GRAPH_POOL) is not None
    assert allocator.reserved_bytes == 20 * 2**20


def test_a_private_request_releases_nothing() -> None:
    """While a graph is captured cached segments stay, so it is refused where others are served."""
    allocator = CachingAllocator(MemoryLimits(capacity_bytes=40 * 2**20))
    allocator.free(_block(allocator, 20 * 2**20))
    assert allocator.malloc(30 * 2**20, GRAPH_POOL) is None
    assert (allocator.retries, allocator.ooms) == (0, 1)
    assert allocator.malloc(30 * 2**20) is not None


def test_a_copy_has_the_private_pool_too() -> None:
    """The copy reuses what is cached there, and leaves the first as it is."""
    allocator = CachingAllocator()
    allocator.free(_block(allocator, 20 * 2**20, GRAPH_POOL))
    twin, _ = allocator.copy()
    assert twin.malloc(20 * 2**20, GRAPH_POOL) is not None
    assert (twin.reserved_bytes, allocator.allocated_bytes) == (20 * 2**20, 0)


def _block(allocator: CachingAllocator, size_bytes: int, stream: int = 0) -> Block:
    block = allocator.malloc(size_bytes, stream)
    assert block is not None
    return block
