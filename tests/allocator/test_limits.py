"""Segments of the allocator simulator at a limit: releases, retries, peaks, snapshots, memory fractions."""

import pytest

from planner.allocator.blocks import BlockState, SegmentState
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MemoryLimits, parse_alloc_conf
from planner.errors import UsageError
from tests.helpers.allocator_steps import FIRST_ADDRESS, Result, Step, alloc, mib, release, replay, rising


def test_capacity_may_be_filled_exactly() -> None:
    """A segment that just fits the capacity is granted without a retry."""
    assert replay(("a", mib(20)), ("b", mib(12)), capacity=mib(32)) == Result(
        placed={"a": (0, mib(20)), "b": (mib(20), mib(12))},
        events=[alloc(0, 20), alloc(20, 12)],
        allocated=mib(32),
        reserved=mib(32),
        peaks=(mib(32), mib(32)),
    )


def test_free_segments_are_released_before_a_retry() -> None:
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
    allocator = CachingAllocator()
    block = allocator.malloc(mib(30))
    assert block is not None and allocator.malloc(512) is not None
    allocator.free(block)
    allocator.empty_cache()
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (512, mib(2))


def test_snapshot_shows_every_block() -> None:
    """A snapshot lists the segments by address and in each the blocks, in use and free."""
    allocator = CachingAllocator(address_of=rising())
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
    with pytest.raises(UsageError, match="per_process_memory_fraction is of the GPU.s memory"):
        CachingAllocator(MemoryLimits(mib(100), config=parse_alloc_conf("per_process_memory_fraction:0.5")))


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
