"""Small histories through the allocator simulator, each worked out by hand and compared as a whole."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from planner.allocator.blocks import Block, BlockState, SegmentEvent, SegmentState
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MIB, AllocatorConfig, config_of_torch, parse_alloc_conf
from planner.errors import UsageError


def mib(number: float) -> int:
    """That many MiB in bytes, exactly."""
    size_bytes = number * MIB
    assert size_bytes == int(size_bytes)
    return int(size_bytes)


FIRST_ADDRESS = 2**32


def rising() -> Callable[[int], int]:
    """Each segment lies above the one before: easier to read than the allocator's own falling addresses."""
    ends = [FIRST_ADDRESS]

    def address_of(size_bytes: int) -> int:
        ends.append(ends[-1] + size_bytes)
        return ends[-2]

    return address_of


Change = tuple[str, int, int]  # (action, address, size)
Step = tuple[str, int] | str


@dataclass(frozen=True)
class Result:
    """What a history came to, in bytes; addresses count from the first one."""

    placed: dict[str, tuple[int, int] | None]  # name -> (address, size of the block); None: out of memory
    events: list[Change]
    allocated: int
    reserved: int
    peaks: tuple[int, int]  # allocated, reserved
    retries: int = 0
    ooms: int = 0


def replay(
    *steps: Step,
    conf: str = "",
    capacity: int | None = None,
    limit: int | None = None,
    total: int | None = None,
) -> Result:
    """Run a history: ("a", size) allocates a block named a, "-a" frees it, "empty_cache" does that."""
    log: list[SegmentEvent] = []
    allocator = CachingAllocator(
        parse_alloc_conf(conf),
        capacity,
        fraction_limit_bytes=limit,
        device_total_bytes=total,
        address_of=rising(),
        segment_events=log,
    )
    placed: dict[str, tuple[int, int] | None] = {}
    blocks: dict[str, Block] = {}
    for step in steps:
        if step == "empty_cache":
            allocator.empty_cache()
        elif isinstance(step, str):
            allocator.free(blocks.pop(step.removeprefix("-")))
        else:
            name, size = step
            block = allocator.malloc(size)
            placed[name] = None
            if block is not None:
                blocks[name] = block
                placed[name] = (block.address - FIRST_ADDRESS, block.size_bytes)
    return Result(
        placed=placed,
        events=[(action, address - FIRST_ADDRESS, size) for action, address, size in log],
        allocated=allocator.allocated_bytes,
        reserved=allocator.reserved_bytes,
        peaks=(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes),
        retries=allocator.retries,
        ooms=allocator.ooms,
    )


def alloc(address: float, size: float) -> Change:
    return "segment_alloc", mib(address), mib(size)


def release(address: float, size: float) -> Change:
    return "segment_free", mib(address), mib(size)


def mapped(address: float, size: float) -> Change:
    return "segment_map", mib(address), mib(size)


def unmapped(address: float, size: float) -> Change:
    return "segment_unmap", mib(address), mib(size)


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
    allocator = CachingAllocator(AllocatorConfig(), capacity_bytes=0)
    block = allocator.malloc(0)
    assert block is not None
    allocator.free(block)
    allocator.free(block)
    assert (block.address, block.size_bytes, block.in_use) == (0, 0, False)
    assert (allocator.snapshot(), allocator.peak_reserved_bytes, allocator.retries) == ((), 0, 0)


def test_a_negative_size_is_refused() -> None:
    """A negative request is a mistake of the caller, not an allocation."""
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        CachingAllocator(AllocatorConfig()).malloc(-1)


def test_a_block_freed_twice_is_refused() -> None:
    """Freeing a block that is not in use is a mistake of the caller, also when it has merged since."""
    allocator = CachingAllocator(AllocatorConfig())
    lower, upper = allocator.malloc(512), allocator.malloc(512)
    assert lower is not None and upper is not None
    allocator.free(lower)
    allocator.free(upper)
    for block in (lower, upper):
        with pytest.raises(ValueError, match="not in use: freed twice"):
            allocator.free(block)


# Choosing and merging blocks


def test_best_fit_takes_the_smallest_block_and_the_lowest_address() -> None:
    """Of the cached blocks that are large enough the smallest serves, of equal ones the lowest."""
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
    allocator = CachingAllocator(config)
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
    allocator = CachingAllocator(config)
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
    asked = []

    def address_of(size_bytes: int) -> int:
        asked.append(size_bytes)
        return next(recorded)

    allocator = CachingAllocator(config, address_of=address_of)
    first, second = allocator.malloc(mib(30)), allocator.malloc(mib(29.5))
    assert first is not None and second is not None
    assert (asked, first.address, second.address) == ([mib(30), mib(30)], mib(800), mib(100))
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


# Running out of memory


def test_capacity_may_be_filled_exactly() -> None:
    """A segment that just fits the capacity is granted without a retry."""
    assert replay(("a", mib(20)), ("b", mib(12)), capacity=mib(32)) == Result(
        placed={"a": (0, mib(20)), "b": (mib(20), mib(12))},
        events=[alloc(0, 20), alloc(20, 12)],
        allocated=mib(32),
        reserved=mib(32),
        peaks=(mib(32), mib(32)),
    )


def test_free_segments_are_released_and_cuda_asked_again() -> None:
    """Beyond the capacity wholly free segments go, large before small, by size; one retry counts."""
    history: list[Step] = [("a", 512), ("b", mib(14)), ("c", mib(12)), ("d", mib(3)), "-a", "-b", "-c"]
    assert replay(*history, ("e", mib(17.5)), capacity=mib(63)) == Result(
        placed={
            "a": (0, 512),
            "b": (mib(2), mib(14)),
            "c": (mib(16), mib(12)),
            "d": (mib(28), mib(3)),
            "e": (mib(48), mib(18)),
        },
        events=[
            alloc(0, 2),
            alloc(2, 14),
            alloc(16, 12),
            alloc(28, 20),
            release(16, 12),
            release(2, 14),
            release(0, 2),
            alloc(48, 18),
        ],
        allocated=mib(21),
        reserved=mib(38),
        peaks=(mib(29) + 512, mib(48)),
        retries=1,
    )


def test_a_segment_in_use_is_not_released() -> None:
    """Out of memory is a result: all free segments are gone, the others stay, and the allocator goes on."""
    history: list[Step] = [("a", mib(14)), ("b", mib(3)), ("c", mib(4)), "-a", "-b"]
    assert replay(*history, ("d", mib(30)), ("e", mib(3)), capacity=mib(34)) == Result(
        placed={
            "a": (0, mib(14)),
            "b": (mib(14), mib(3)),
            "c": (mib(17), mib(4)),
            "d": None,
            "e": (mib(14), mib(3)),
        },
        events=[alloc(0, 14), alloc(14, 20), release(0, 14)],
        allocated=mib(7),
        reserved=mib(20),
        peaks=(mib(21), mib(34)),
        retries=1,
        ooms=1,
    )


def test_empty_cache_releases_wholly_free_segments() -> None:
    """Emptying the cache gives back wholly free segments and counts no retry; the peaks stay."""
    history: list[Step] = [("a", mib(14)), ("b", mib(3)), ("c", mib(4)), "-a", "-b"]
    assert replay(*history, "empty_cache") == Result(
        placed={"a": (0, mib(14)), "b": (mib(14), mib(3)), "c": (mib(17), mib(4))},
        events=[alloc(0, 14), alloc(14, 20), release(0, 14)],
        allocated=mib(4),
        reserved=mib(20),
        peaks=(mib(21), mib(34)),
    )


def test_peaks_can_be_reset() -> None:
    """After a reset the peaks start from what is held now."""
    allocator = CachingAllocator(AllocatorConfig())
    block = allocator.malloc(mib(30))
    assert block is not None and allocator.malloc(512) is not None
    allocator.free(block)
    allocator.empty_cache()
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (512, mib(2))


def test_snapshot_shows_every_block() -> None:
    """A snapshot lists the segments by address and in each the blocks, in use and free."""
    allocator = CachingAllocator(AllocatorConfig(), address_of=rising())
    for size_bytes in (mib(3), mib(4), 512):
        assert allocator.malloc(size_bytes) is not None
    assert allocator.snapshot() == (
        SegmentState(
            address=FIRST_ADDRESS,
            size_bytes=mib(20),
            pool="large",
            blocks=(
                BlockState(FIRST_ADDRESS, mib(3), in_use=True),
                BlockState(FIRST_ADDRESS + mib(3), mib(4), in_use=True),
                BlockState(FIRST_ADDRESS + mib(7), mib(13), in_use=False),
            ),
        ),
        SegmentState(
            address=FIRST_ADDRESS + mib(20),
            size_bytes=mib(2),
            pool="small",
            blocks=(
                BlockState(FIRST_ADDRESS + mib(20), 512, in_use=True),
                BlockState(FIRST_ADDRESS + mib(20) + 512, mib(2) - 512, in_use=False),
            ),
        ),
    )


# Memory fraction


@pytest.mark.parametrize(
    ("conf", "limit", "total"),
    [
        ("", mib(40), None),
        ("per_process_memory_fraction:0.5", None, mib(80)),
        ("per_process_memory_fraction:0.01", mib(40), mib(80)),
    ],
    ids=["by call", "by option", "the call wins"],
)
def test_a_memory_fraction_limits_the_segments(conf: str, limit: int | None, total: int | None) -> None:
    """The limit acts as a capacity, whether the option sets it or the call, which goes before the option."""
    history: list[Step] = [("a", mib(20)), ("b", mib(20)), "-a"]
    assert replay(*history, ("c", mib(22)), conf=conf, limit=limit, total=total) == Result(
        placed={"a": (0, mib(20)), "b": (mib(20), mib(20)), "c": None},
        events=[alloc(0, 20), alloc(20, 20), release(0, 20)],
        allocated=mib(20),
        reserved=mib(20),
        peaks=(mib(40), mib(40)),
        retries=1,
        ooms=1,
    )


def test_a_fraction_of_an_unknown_total_is_refused() -> None:
    """A fraction in the configuration needs the GPU's total memory."""
    with pytest.raises(UsageError, match="per_process_memory_fraction needs the total memory of the GPU"):
        CachingAllocator(parse_alloc_conf("per_process_memory_fraction:0.5"), mib(100))


def test_throw_on_cudamalloc_oom_releases_nothing() -> None:
    """With throw_on_cudamalloc_oom a request beyond the option's fraction fails though the cache could go."""
    conf = "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"
    assert replay(("a", mib(30)), "-a", ("b", mib(32)), conf=conf, total=mib(80)) == Result(
        placed={"a": (0, mib(30)), "b": None},
        events=[alloc(0, 30)],
        allocated=0,
        reserved=mib(30),
        peaks=(mib(30), mib(30)),
        ooms=1,
    )


def test_throw_on_cudamalloc_oom_concerns_the_option_only() -> None:
    """A limit set by call, and a full device, still release the cache and try again."""
    result = Result(
        placed={"a": (0, mib(30)), "b": (mib(30), mib(32))},
        events=[alloc(0, 30), release(0, 30), alloc(30, 32)],
        allocated=mib(32),
        reserved=mib(32),
        peaks=(mib(32), mib(32)),
        retries=1,
    )
    history: list[Step] = [("a", mib(30)), "-a", ("b", mib(32))]
    conf = "throw_on_cudamalloc_oom:True"
    assert replay(*history, conf=conf, limit=mib(40)) == result
    assert replay(*history, conf=conf, capacity=mib(40)) == result
    conf += ",per_process_memory_fraction:0.9"
    assert replay(*history, conf=conf, capacity=mib(40), total=mib(80)) == result


# Options


@pytest.mark.parametrize(
    ("conf", "requested", "block"),
    [
        ("roundup_power2_divisions:4", 2048, 2048),  # not above 4 x 512 bytes: multiples of 512
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:4", 1280 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:4", mib(16), mib(16)),
        ("roundup_power2_divisions:4", mib(16) + 1, mib(20)),
        ("roundup_power2_divisions:4", mib(28) + 1, mib(32)),
        ("roundup_power2_divisions:1", mib(16) + 1, mib(16) + 512),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", mib(100) + 1, mib(100) + 512),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", mib(300) + 1, mib(300) + 512),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", mib(512) - 1, mib(512)),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", mib(600), mib(768)),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", mib(1100), mib(1280)),
        ("roundup_power2_divisions:[256:1,512:2,>:4]", mib(100 * 1024), mib(112 * 1024)),
        ("roundup_power2_divisions:[2:8]", mib(1.5) + 1, mib(1.625)),
        ("roundup_power2_divisions:[2:8]", mib(4.25) + 1, mib(4.25) + 512),
    ],
)
def test_roundup_power2_divisions(conf: str, requested: int, block: int) -> None:
    """Sizes round up to the next of d equal steps between powers of two, d by size class."""
    assert parse_alloc_conf(conf).block_bytes(requested) == block
    placed = replay(("a", requested), ("b", 512), conf=conf).placed["a"]
    assert placed is not None and block <= placed[1] <= block + mib(1)


def test_large_segment_size() -> None:
    """large_segment_size_mb is the segment of requests of 1 to 10 MiB, of no others."""
    history: list[Step] = [("a", mib(10)), ("b", mib(1)), ("c", mib(1) + 1)]
    assert replay(*history, conf="large_segment_size_mb:40") == Result(
        placed={"a": (0, mib(10)), "b": (mib(10), mib(1)), "c": (mib(12), mib(1) + 512)},
        events=[alloc(0, 10), alloc(10, 2), alloc(12, 40)],
        allocated=mib(12) + 512,
        reserved=mib(52),
        peaks=(mib(12) + 512, mib(52)),
    )


def test_blocks_of_max_split_size_are_not_split() -> None:
    """A request of max_split_size_mb takes its segment whole, a smaller one still splits it."""
    history: list[Step] = [("a", mib(22.5)), ("b", mib(20.5))]
    assert replay(*history, conf="max_split_size_mb:22") == Result(
        placed={"a": (0, mib(24)), "b": (mib(24), mib(20.5))},
        events=[alloc(0, 24), alloc(24, 22)],
        allocated=mib(44.5),
        reserved=mib(46),
        peaks=(mib(44.5), mib(46)),
    )


@pytest.mark.parametrize(
    ("conf", "request_mib", "block_mib", "new_segment"),
    [
        ("max_split_size_mb:30", 29.5, 30, alloc(50, 30)),  # smaller than max_split_size_mb
        ("max_split_size_mb:30", 30, 30, alloc(50, 30)),  # 50 - 30 = 20: the rounding limit is exclusive
        ("max_split_size_mb:30", 30.5, 50, None),
        ("max_split_size_mb:30,max_non_split_rounding_mb:21", 30, 50, None),
        ("max_split_size_mb:50", 29.5, 30, alloc(50, 30)),
        ("max_split_size_mb:51", 29.5, 29.5, None),
    ],
)
def test_which_requests_an_oversize_block_serves(
    conf: str, request_mib: float, block_mib: float, new_segment: Change | None
) -> None:
    """A cached block of 50 MiB, if oversize, serves whole those requests that waste little of it."""
    result = replay(("a", mib(50)), "-a", ("b", mib(request_mib)), conf=conf)
    assert result.events == [alloc(0, 50)] + ([] if new_segment is None else [new_segment])
    assert result.allocated == mib(block_mib)


def test_one_sufficient_oversize_block_is_released() -> None:
    """Where max_split_size_mb is set, the smallest oversize block that suffices goes, and no retry counts."""
    history: list[Step] = [("a", mib(30)), ("b", mib(60)), ("c", mib(70)), ("d", mib(12))]
    history += ["-a", "-b", "-c", "-d"]
    assert replay(*history, ("e", mib(40)), conf="max_split_size_mb:20", capacity=mib(180)) == Result(
        placed={
            "a": (0, mib(30)),
            "b": (mib(30), mib(60)),
            "c": (mib(90), mib(70)),
            "d": (mib(160), mib(12)),
            "e": (mib(172), mib(40)),
        },
        events=[alloc(0, 30), alloc(30, 60), alloc(90, 70), alloc(160, 12), release(30, 60), alloc(172, 40)],
        allocated=mib(40),
        reserved=mib(152),
        peaks=(mib(172), mib(172)),
    )


def test_several_oversize_blocks_are_released_from_the_largest() -> None:
    """Where no oversize block suffices alone, they go from the largest down until their sum does."""
    history: list[Step] = [("a", mib(22)), ("b", mib(30)), ("c", mib(24)), ("d", mib(12))]
    history += ["-a", "-b", "-c", "-d"]
    assert replay(*history, ("e", mib(54)), conf="max_split_size_mb:20", capacity=mib(90)) == Result(
        placed={
            "a": (0, mib(22)),
            "b": (mib(22), mib(30)),
            "c": (mib(52), mib(24)),
            "d": (mib(76), mib(12)),
            "e": (mib(88), mib(54)),
        },
        events=[
            alloc(0, 22),
            alloc(22, 30),
            alloc(52, 24),
            alloc(76, 12),
            release(22, 30),
            release(52, 24),
            alloc(88, 54),
        ],
        allocated=mib(54),
        reserved=mib(88),
        peaks=(mib(88), mib(88)),
    )


@pytest.mark.parametrize(("split_mib", "retries"), [(30, 0), (31, 1)])
def test_a_block_of_max_split_size_is_oversize(split_mib: int, retries: int) -> None:
    """A cached block of exactly max_split_size_mb is released without a retry, a smaller one with it."""
    history: list[Step] = [("a", mib(30)), ("b", mib(40)), "-a", "-b"]
    conf = f"max_split_size_mb:{split_mib}"
    result = replay(*history, ("c", mib(70)), conf=conf, capacity=mib(100))
    assert result.events == [alloc(0, 30), alloc(30, 40), release(30, 40), release(0, 30), alloc(70, 70)]
    assert (result.retries, result.ooms) == (retries, 0)


def test_oversize_blocks_that_do_not_suffice_go_nevertheless() -> None:
    """Where all oversize blocks are too little they go, and the rest with a retry, even if CUDA had room."""
    history: list[Step] = [("a", mib(30)), ("b", mib(12)), "-a", "-b"]
    assert replay(*history, ("c", mib(40)), conf="max_split_size_mb:20", capacity=mib(60)) == Result(
        placed={"a": (0, mib(30)), "b": (mib(30), mib(12)), "c": (mib(42), mib(40))},
        events=[alloc(0, 30), alloc(30, 12), release(0, 30), release(30, 12), alloc(42, 40)],
        allocated=mib(40),
        reserved=mib(40),
        peaks=(mib(42), mib(42)),
        retries=1,
    )


@pytest.mark.parametrize(
    ("limit", "released"),
    [
        (None, []),
        (mib(192), []),  # the threshold is reached, not exceeded
        (mib(190), [release(0, 30)]),
        (mib(140), [release(0, 30)]),  # above the threshold by 26 MiB: the older block suffices
        (mib(130), [release(0, 30), release(30, 32)]),  # by 31 MiB: the younger goes too
    ],
)
def test_garbage_collection(limit: int | None, released: list[Change]) -> None:
    """Above the threshold, before new memory, the blocks idle for longer than the mean go until it is met."""
    history: list[Step] = [("a", mib(30)), ("b", mib(32)), "-a", ("c", mib(34)), "-b"]
    result = replay(*history, ("d", mib(40)), conf="garbage_collection_threshold:0.5", limit=limit)
    allocations = [alloc(0, 30), alloc(30, 32), alloc(62, 34)]
    assert result.events == [*allocations, *released, alloc(96, 40)]
    assert (result.allocated, result.retries, result.ooms) == (mib(74), 0, 0)


def test_garbage_collection_within_the_fraction_of_the_rules() -> None:
    """The threshold is also a part of the limit that per_process_memory_fraction sets."""
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    result = replay(("a", mib(30)), "-a", ("b", mib(32)), conf=conf, total=mib(116))
    assert result.events == [alloc(0, 30), release(0, 30), alloc(30, 32)]
    assert (result.reserved, result.retries) == (mib(32), 0)


# Expandable segments


def test_expandable_segments_grow_in_place() -> None:
    """The large pool grows by pages of 20 MiB behind its free end, and any 512 bytes are split off."""
    history: list[Step] = [("a", mib(30)), ("b", mib(15)), ("c", mib(15) - 512)]
    assert replay(*history, conf="expandable_segments:True") == Result(
        placed={"a": (0, mib(30)), "b": (mib(30), mib(15)), "c": (mib(45), mib(15) - 512)},
        events=[mapped(0, 40), mapped(40, 20)],
        allocated=mib(60) - 512,
        reserved=mib(60),
        peaks=(mib(60) - 512, mib(60)),
    )


def test_expandable_small_pages() -> None:
    """The small pool grows by pages of 2 MiB in a range of its own."""
    history: list[Step] = [("large", mib(5)), ("a", mib(1)), ("b", mib(0.5)), ("c", mib(1))]
    result = replay(*history, conf="expandable_segments:True,large_segment_size_mb:32", capacity=mib(64))
    assert result == Result(  # the large range: 9/8 of 64 MiB in pages of 32 MiB
        placed={
            "large": (0, mib(5)),
            "a": (mib(96), mib(1)),
            "b": (mib(97), mib(0.5)),
            "c": (mib(97.5), mib(1)),
        },
        events=[mapped(0, 32), mapped(96, 2), mapped(98, 2)],
        allocated=mib(7.5),
        reserved=mib(36),
        peaks=(mib(7.5), mib(36)),
    )


def test_whole_free_pages_are_unmapped_and_filled_again() -> None:
    """Emptying the cache unmaps the pages that are wholly free; the lowest gap with room fills first."""
    history: list[Step] = [("a", mib(30)), ("b", mib(15)), "-a", "empty_cache"]
    assert replay(*history, ("c", mib(25)), conf="expandable_segments:True") == Result(
        placed={"a": (0, mib(30)), "b": (mib(30), mib(15)), "c": (0, mib(25))},
        events=[mapped(0, 40), mapped(40, 20), unmapped(0, 20), mapped(0, 20)],
        allocated=mib(40),
        reserved=mib(60),
        peaks=(mib(45), mib(60)),
    )


@pytest.mark.parametrize(("total", "second_range"), [(None, mib(100)), (mib(160), mib(180))])
def test_an_empty_range_is_given_back(total: int | None, second_range: int) -> None:
    """A range without pages goes; the next one lies behind it: 9/8 of the device's memory in whole pages."""
    conf = "expandable_segments:True"
    history: list[Step] = [("a", mib(25)), "-a", "empty_cache", ("b", mib(25))]
    assert replay(*history, conf=conf, capacity=mib(80), total=total) == Result(
        placed={"a": (0, mib(25)), "b": (second_range, mib(25))},
        events=[mapped(0, 40), unmapped(0, 40), ("segment_map", second_range, mib(40))],
        allocated=mib(25),
        reserved=mib(40),
        peaks=(mib(25), mib(40)),
    )


def test_the_growing_end_is_used_last() -> None:
    """A block counts with the unmapped space behind it: the end of the segment serves after larger blocks."""
    history: list[Step] = [("a", mib(16)), ("b", mib(4)), ("c", mib(17)), ("d", mib(1.5)), ("e", mib(26.5))]
    history += ["-a", "-c"]
    assert replay(*history, ("f", mib(12)), conf="expandable_segments:True") == Result(
        placed={
            "a": (0, mib(16)),
            "b": (mib(16), mib(4)),
            "c": (mib(20), mib(17)),
            "d": (mib(37), mib(1.5)),
            "e": (mib(38.5), mib(26.5)),
            "f": (0, mib(12)),  # 16 MiB in all, before 15 MiB with room and before 17 MiB
        },
        events=[mapped(0, 20), mapped(20, 20), mapped(40, 40)],
        allocated=mib(44),
        reserved=mib(80),
        peaks=(mib(65), mib(80)),
    )


def test_a_block_with_as_much_room_goes_before_a_larger_one() -> None:
    """15 MiB with 20 unmapped behind them count as much as 35 MiB, and the smaller block is taken."""
    history: list[Step] = [("a", mib(5)), ("b", mib(15)), ("c", mib(20)), ("d", mib(35)), ("e", mib(5))]
    history += ["-c", "empty_cache", "-b", "-d"]
    assert replay(*history, ("f", mib(12)), conf="expandable_segments:True") == Result(
        placed={
            "a": (0, mib(5)),
            "b": (mib(5), mib(15)),
            "c": (mib(20), mib(20)),
            "d": (mib(40), mib(35)),
            "e": (mib(75), mib(5)),
            "f": (mib(5), mib(12)),
        },
        events=[mapped(0, 20), mapped(20, 20), mapped(40, 40), unmapped(20, 20)],
        allocated=mib(22),
        reserved=mib(60),
        peaks=(mib(80), mib(80)),
    )


def test_oversize_expandable_blocks_are_not_released_alone() -> None:
    """With both options a refused request goes straight to the retry, which unmaps whole free pages."""
    history: list[Step] = [("a", mib(25)), ("b", mib(10)), "-a"]
    conf = "expandable_segments:True,max_split_size_mb:20"
    assert replay(*history, ("c", mib(30)), conf=conf, capacity=mib(60)) == Result(
        placed={"a": (0, mib(25)), "b": (mib(25), mib(10)), "c": (mib(35), mib(30))},
        events=[mapped(0, 40), unmapped(0, 20), mapped(40, 40)],
        allocated=mib(40),
        reserved=mib(60),
        peaks=(mib(40), mib(60)),
        retries=1,
    )


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_unmapped_neighbours_become_one_gap(first: str, second: str) -> None:
    """Pages unmapped one after the other are mapped again at once."""
    history: list[Step] = [("a", mib(20)), ("b", mib(20)), ("c", mib(20))]
    history += [f"-{first}", "empty_cache", f"-{second}", "empty_cache"]
    result = replay(*history, ("d", mib(40)), conf="expandable_segments:True")
    starts = {"a": 0, "b": 20}
    pages = [mapped(0, 20), mapped(20, 20), mapped(40, 20)]
    assert result.events == [
        *pages,
        unmapped(starts[first], 20),
        unmapped(starts[second], 20),
        mapped(0, 40),
    ]
    assert result.placed["d"] == (0, mib(40))


def test_a_gap_between_free_blocks_is_filled() -> None:
    """A request may span a free block, a gap, of which no more than is there is mapped, and a free block."""
    history: list[Step] = [("a", mib(20)), ("b", mib(20)), ("c", mib(20)), ("d", mib(20))]
    history += ["-b", "empty_cache", "-a", "-c"]
    assert replay(*history, ("e", mib(55)), conf="expandable_segments:True") == Result(
        placed={
            "a": (0, mib(20)),
            "b": (mib(20), mib(20)),
            "c": (mib(40), mib(20)),
            "d": (mib(60), mib(20)),
            "e": (0, mib(55)),
        },
        events=[
            mapped(0, 20),
            mapped(20, 20),
            mapped(40, 20),
            mapped(60, 20),
            unmapped(20, 20),
            mapped(20, 20),
        ],
        allocated=mib(75),
        reserved=mib(80),
        peaks=(mib(80), mib(80)),
    )


def test_expandable_segments_out_of_memory_halfway() -> None:
    """Pages mapped before CUDA refuses more stay cached, go for the retry, and the retry may fail."""
    full: list[Step] = [("a", mib(20)), ("b", mib(20)), ("c", mib(20)), ("d", mib(20))]
    history: list[Step] = [*full, "-a", "-c", "empty_cache", "-b"]
    conf = "expandable_segments:True"
    small = mib(100)  # where the small pool's range starts: 9/8 of 81 MiB in pages of 20 MiB
    assert replay(*history, ("s", 512), ("e", mib(60)), conf=conf, capacity=mib(81)) == Result(
        placed={
            "a": (0, mib(20)),
            "b": (mib(20), mib(20)),
            "c": (mib(40), mib(20)),
            "d": (mib(60), mib(20)),
            "s": (small, 512),
            "e": None,
        },
        events=[
            mapped(0, 20),
            mapped(20, 20),
            mapped(40, 20),
            mapped(60, 20),
            unmapped(0, 20),
            unmapped(40, 20),
            ("segment_map", small, mib(2)),
            mapped(0, 20),
            unmapped(0, 40),
        ],
        allocated=mib(20) + 512,
        reserved=mib(22),
        peaks=(mib(80), mib(80)),
        retries=1,
        ooms=1,
    )


def test_the_limit_compares_segments_not_pages() -> None:
    """A memory limit counts what cudaMalloc would have taken: pages may exceed it, or be refused below it."""
    history: list[Step] = [("a", mib(22)), ("b", mib(12)), ("c", mib(7))]
    assert replay(*history, conf="expandable_segments:True", limit=mib(30)) == Result(
        placed={"a": (0, mib(22)), "b": (mib(22), mib(12)), "c": None},
        events=[mapped(0, 40)],
        allocated=mib(34),
        reserved=mib(40),
        peaks=(mib(34), mib(40)),
        retries=1,
        ooms=1,
    )


def test_oversize_expandable_blocks_are_found_by_growing() -> None:
    """A cached block that max_split_size_mb keeps from the search is still where the segment grows from."""
    conf = "expandable_segments:True,max_split_size_mb:20"
    assert replay(("a", mib(30)), "-a", ("b", mib(5)), conf=conf) == Result(
        placed={"a": (0, mib(30)), "b": (0, mib(5))},
        events=[mapped(0, 40)],
        allocated=mib(5),
        reserved=mib(40),
        peaks=(mib(30), mib(40)),
    )


def test_snapshot_shows_contiguous_pieces_of_an_expandable_segment() -> None:
    """An expandable segment appears as one state per stretch of mapped pages, and counts as no segment."""
    allocator = CachingAllocator(parse_alloc_conf("expandable_segments:True"), address_of=rising())
    first, second, third = (allocator.malloc(mib(size)) for size in (20, 20, 25))
    assert first is not None and second is not None and third is not None
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.segments == 0
    assert allocator.snapshot() == (
        SegmentState(FIRST_ADDRESS, mib(20), "large", (BlockState(FIRST_ADDRESS, mib(20), in_use=True),)),
        SegmentState(
            FIRST_ADDRESS + mib(40),
            mib(40),
            "large",
            (
                BlockState(FIRST_ADDRESS + mib(40), mib(25), in_use=True),
                BlockState(FIRST_ADDRESS + mib(65), mib(15), in_use=False),
            ),
        ),
    )
