"""Settings of the allocator simulator: rounding, oversize blocks, garbage collection."""

import pytest

from planner.allocator.config import parse_alloc_conf
from tests.helpers.allocator_steps import Change, Result, Step, alloc, mib, release, replay


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
    """If max_split_size_mb is set, the smallest oversize block that suffices goes, and no retry counts."""
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
    """If no oversize block suffices alone, they go from the largest down until their sum does."""
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
    """If all oversize blocks are too little they go, and the rest with a retry, even if CUDA had room."""
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
