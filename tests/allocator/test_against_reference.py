"""Random histories through the fast allocator and the slow one: all that can be seen must be the same."""

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from planner.allocator.blocks import Block, BlockPool, BlockState, SegmentEvent
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MIB, AllocatorConfig, MemoryLimits, ReuseOrder, parse_alloc_conf
from tests.helpers.reference_allocator import SlowAllocator

pytestmark = pytest.mark.slow

BOUNDARIES = [512, 1024, *(mib * MIB for mib in (1, 2, 10, 19, 20, 21, 22, 30, 31, 32))]

sizes = st.one_of(
    st.builds(lambda size, off: max(0, size + off), st.sampled_from(BOUNDARIES), st.integers(-600, 600)),
    st.integers(0, 4096),
    st.integers(1, MIB),
    st.integers(MIB, 10 * MIB),
    st.integers(10 * MIB, 50 * MIB),
    st.integers(1, 50).map(lambda mib: mib * MIB),
)

# Several to a page of 20 MiB.
half_mebibytes = st.integers(3, 80).map(lambda halves: halves * MIB // 2)

# Most of them segments of their own, many of the same size.
large_sizes = st.one_of(
    st.integers(18, 40).map(lambda mib: mib * MIB),
    st.integers(10 * MIB, 70 * MIB),
    st.sampled_from([mib * MIB for mib in (3, 20, 22, 24, 30, 60)]),
)

Operation = tuple[str, int]


def operations(requests: st.SearchStrategy[int]) -> st.SearchStrategy[list[Operation]]:
    """Histories: somewhat more requests than frees, which name one of the live blocks by remainder."""
    mallocs = requests.map(lambda size: ("malloc", size))
    frees = st.integers(0, 10**6).map(lambda turn: ("free", turn))
    others = st.sampled_from([*[("empty_cache", 0)] * 4, ("reset_peaks", 0), ("free_all", 0)])
    streams = st.integers(0, 2).map(lambda stream: ("stream", stream))  # of the requests that follow
    return st.lists(
        st.one_of(mallocs, mallocs, mallocs, frees, frees, st.one_of(others, streams)),
        min_size=5,
        max_size=60,
    )


capacities = st.one_of(st.none(), st.integers(0, 200 * MIB), st.integers(1, 100).map(lambda n: n * 2 * MIB))
limits = st.one_of(st.none(), st.none(), st.integers(0, 200 * MIB))
reuse_orders = st.sampled_from(ReuseOrder)
seeds = st.one_of(st.none(), st.integers(0, 100))
roundings = st.sampled_from(["2", "8", "[16:4]", "[1:2,8:4,>:1]", "[4:2,16:8,>:16]", "[1:0,>:4]"])


@st.composite
def rule_texts(draw: st.DrawFn) -> str:
    """Any mixture of the options that move memory."""
    large_mib = draw(st.sampled_from([None, None, 11, 20, 32]))
    options = {} if large_mib is None else {"large_segment_size_mb": str(large_mib)}
    large_mib = large_mib or 20
    options |= {
        "max_split_size_mb": str(large_mib + draw(st.sampled_from([0, 1, 10]))),
        "max_non_split_rounding_mb": str(large_mib + draw(st.sampled_from([0, 5]))),
        "roundup_power2_divisions": draw(roundings),
        "garbage_collection_threshold": draw(st.sampled_from(["0.3", "0.6", "0.9"])),
        "expandable_segments": draw(st.sampled_from(["True", "False"])),
        "per_process_memory_fraction": draw(st.sampled_from(["0.1", "0.5", "0.9", "1.0"])),
        "throw_on_cudamalloc_oom": draw(st.sampled_from(["True", "False"])),
    }
    left_out = draw(st.sets(st.sampled_from(sorted(options.keys() - {"large_segment_size_mb"}))))
    return ",".join(f"{name}:{options[name]}" for name in sorted(options.keys() - left_out))


def spread_addresses(seed: int) -> Callable[[int], int]:
    """Addresses far apart, in no order."""
    places = list(range(1, 4096))
    random.Random(seed).shuffle(places)
    iterator: Iterator[int] = iter(places)
    return lambda size_bytes: next(iterator) << 48


def assert_identities(allocator: CachingAllocator) -> None:
    """Check what holds in every state of any allocator of this kind."""
    snapshot = allocator.snapshot()
    blocks = [block for segment in snapshot for block in segment.blocks]
    assert sum(block.size_bytes for block in blocks if block.in_use) == allocator.allocated_bytes
    assert sum(block.size_bytes for block in blocks) == allocator.reserved_bytes
    assert sum(segment.size_bytes for segment in snapshot) == allocator.reserved_bytes
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    end = 0
    for segment in snapshot:
        assert segment.address >= end  # segments do not overlap
        end = segment.address
        for block in segment.blocks:
            assert block.address == end  # blocks tile their segment
            assert block.size_bytes > 0 and block.size_bytes % 512 == 0
            end += block.size_bytes
        assert end == segment.address + segment.size_bytes
        for lower, upper in zip(segment.blocks, segment.blocks[1:], strict=False):
            assert lower.in_use or upper.in_use  # neighbours of a free block are in use
    for head in allocator._segments.heads.values():
        assert head.prev is None and (head.cached or head.in_use or head in head.pool.unmapped)
    for pool in (pool for pools in allocator._of_streams.values() for pool in pools):
        of_pool = [one for one in snapshot if (one.pool, one.stream) == (pool.name, pool.stream)]
        assert_index(pool, [segment.blocks for segment in of_pool])


def assert_index(pool: BlockPool, segments: list[tuple[BlockState, ...]]) -> None:
    """The pool's index holds exactly the free blocks, in order; its unmapped blocks are whole pages."""
    free = [(block.size_bytes, block.address) for blocks in segments for block in blocks if not block.in_use]
    assert sorted((block.size_bytes, block.address) for _, _, block in pool.cached) == sorted(free)
    assert [entry[:2] for entry in pool.cached] == sorted(entry[:2] for entry in pool.cached)
    for size_bytes, rank, block in pool.cached:
        assert (block.size_bytes, block.rank) == (size_bytes, rank)
        assert block.cached and not block.in_use and block.pool is pool
    assert [block.address for block in pool.unmapped] == sorted(block.address for block in pool.unmapped)
    for block in pool.unmapped:
        assert not block.cached and not block.in_use and block.range_address is not None
        assert (block.address - block.range_address) % pool.page_bytes == 0
        assert block.size_bytes % pool.page_bytes == 0


class Pair:
    """Both allocators under the same operations."""

    def __init__(
        self,
        config: AllocatorConfig,
        capacity: int | None,
        *,
        limit: int | None = None,
        total: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.events: list[SegmentEvent] = []
        self.capacity = capacity
        self.fast = CachingAllocator(
            MemoryLimits(capacity, limit, total, config),
            address_of=None if seed is None else spread_addresses(seed),
            segment_events=self.events,
        )
        address_of = falling_addresses() if seed is None else spread_addresses(seed)
        self.slow = SlowAllocator(config, capacity, limit, total, address_of)
        self.live: list[tuple[Block, int]] = []
        self.stream = 0

    def apply(self, action: str, argument: int) -> None:
        if action == "malloc":
            self.malloc(argument)
        elif action == "free" and self.live:
            self.free(argument % len(self.live))
        elif action == "free_all":
            while self.live:
                self.free(len(self.live) - 1)
        elif action == "empty_cache":
            self.fast.empty_cache()
            self.slow.empty_cache()
        elif action == "stream":
            self.stream = argument
        elif action == "reset_peaks":
            self.fast.reset_peaks()
            self.slow.reset_peaks()

    def malloc(self, size_bytes: int) -> None:
        block = self.fast.malloc(size_bytes, self.stream)
        expected = self.slow.malloc(size_bytes, self.stream)
        assert (None if block is None else (block.address, block.size_bytes)) == expected
        if block is not None:
            self.live.append((block, block.address))

    def free(self, place: int) -> None:
        block, address = self.live.pop(place)
        self.fast.free(block)
        self.slow.free(address)

    def assert_same(self) -> None:
        names = (
            "allocated_bytes",
            "reserved_bytes",
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "segments",
            "retries",
            "ooms",
        )
        fast = {name: getattr(self.fast, name) for name in names}
        assert fast == {name: getattr(self.slow, name) for name in names}
        assert self.events == self.slow.events
        assert self.fast.snapshot() == self.slow.snapshot()
        assert_identities(self.fast)
        assert self.capacity is None or self.fast.reserved_bytes <= self.capacity


def falling_addresses() -> Callable[[int], int]:
    """The default of the fast allocator, in slow form."""
    lowest = [2**52]

    def address_of(size_bytes: int) -> int:
        lowest.append(lowest[-1] - size_bytes)
        return lowest[-1]

    return address_of


def run(pair: Pair, history: list[Operation]) -> None:
    for action, argument in history:
        pair.apply(action, argument)
        pair.assert_same()


@settings(max_examples=400)
@given(operations(sizes), capacities, seeds, reuse_orders)
def test_default_rules_agree_with_the_slow_allocator(
    history: list[Operation], capacity: int | None, seed: int | None, order: ReuseOrder
) -> None:
    """Under PyTorch's defaults both allocators do the same, whatever the history, capacity and addresses."""
    run(Pair(AllocatorConfig(reuse_order=order), capacity, seed=seed), history)


@settings(max_examples=400)
@given(operations(st.one_of(sizes, half_mebibytes)), capacities, limits, seeds)
def test_expandable_segments_agree_with_the_slow_allocator(
    history: list[Operation], capacity: int | None, limit: int | None, seed: int | None
) -> None:
    """With expandable segments both allocators map and unmap the same pages in the same order."""
    run(Pair(AllocatorConfig(expandable_segments=True), capacity, limit=limit, seed=seed), history)


@settings(max_examples=400)
@given(
    operations(large_sizes),
    st.integers(20, 31),
    st.integers(20, 31),
    st.integers(50, 250),
    seeds,
    reuse_orders,
)
def test_max_split_size_agrees_with_the_slow_allocator(
    history: list[Operation],
    split_mib: int,
    rounding_mib: int,
    capacity_mib: int,
    seed: int | None,
    order: ReuseOrder,
) -> None:
    """With unsplittable blocks about as large as the requests, and little capacity, both release the same."""
    config = AllocatorConfig(
        max_split_bytes=split_mib * MIB,
        max_non_split_rounding_bytes=rounding_mib * MIB,
        reuse_order=order,
    )
    run(Pair(config, capacity_mib * MIB, seed=seed), history)


@settings(max_examples=400)
@given(operations(large_sizes), st.sampled_from([0.25, 0.5, 0.9]), st.integers(50, 1000), st.integers(0, 3))
def test_garbage_collection_agrees_with_the_slow_allocator(
    history: list[Operation], threshold: float, limit_mib: int, growth: int
) -> None:
    """With a memory limit and a threshold both allocators collect the same blocks at the same time."""
    growing = [
        (action, argument + place * growth * MIB if action == "malloc" else argument)
        for place, (action, argument) in enumerate(history)  # larger requests are not served from the cache
    ]
    config = AllocatorConfig(garbage_collection_threshold=threshold)
    run(Pair(config, None, limit=limit_mib * MIB), growing)


@settings(max_examples=600)
@given(rule_texts(), operations(sizes), capacities, limits, st.integers(0, 50 * MIB), seeds, reuse_orders)
def test_all_options_agree_with_the_slow_allocator(
    rule_text: str,
    history: list[Operation],
    capacity: int | None,
    limit: int | None,
    more: int,
    seed: int | None,
    order: ReuseOrder,
) -> None:
    """Under any mixture of options, capacity and memory limit both allocators do the same."""
    total = (200 * MIB if capacity is None else capacity) + more
    config = parse_alloc_conf(rule_text, AllocatorConfig(reuse_order=order))
    run(Pair(config, capacity, limit=limit, total=total, seed=seed), history)
