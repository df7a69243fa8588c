"""Expandable segments of the allocator simulator, page by page."""

import pytest

from planner.allocator.blocks import BlockState, SegmentState
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MemoryLimits, parse_alloc_conf
from tests.helpers.allocator_steps import FIRST_ADDRESS, Change, Result, Step, mib, replay, rising


def mapped(address: float, size: float) -> Change:
    return "segment_map", mib(address), mib(size)


def unmapped(address: float, size: float) -> Change:
    return "segment_unmap", mib(address), mib(size)


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
    limits = MemoryLimits(config=parse_alloc_conf("expandable_segments:True"))
    allocator = CachingAllocator(limits, address_of=rising())
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
