"""The replay of recorded allocator histories: literal ones, and such as the simulator itself made."""

import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planner.allocator.blocks import SegmentEvent
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MIB, MemoryLimits, config_of_torch, parse_alloc_conf
from planner.allocator.history.check import check_history
from planner.allocator.history.file import load_history, save_history
from planner.allocator.history.history import (
    SEGMENT_SIGNS,
    History,
    HistoryEvent,
    HistoryMark,
)
from planner.errors import DataFileError
from planner.program.events import Phase
from tests.helpers.structs import replace

BASE = 0x7F00_0000_0000


def history_of(
    *events: tuple[str, int, int], alloc_conf: str = "", limit_bytes: int | None = None
) -> History:
    made = tuple(HistoryEvent(*event) for event in events)
    return History("GPU", "2.13.0", alloc_conf, 80 * 1024 * MIB, limit_bytes, made)


# Three requests: a small one opens 2 MiB; 3 MiB open 20 MiB; 5 MiB are cut from what is left of these.
PLAIN = (
    ("segment_alloc", BASE, 2 * MIB),
    ("alloc", BASE, 4096),
    ("segment_alloc", BASE + 64 * MIB, 20 * MIB),
    ("alloc", BASE + 64 * MIB, 3 * MIB),
    ("alloc", BASE + 67 * MIB, 5 * MIB),
    ("free_requested", BASE + 64 * MIB, 3 * MIB),
    ("free_completed", BASE + 64 * MIB, 3 * MIB),
)


def test_a_history_that_the_simulator_agrees_with_has_no_difference() -> None:
    """Equal segments and places: no difference, and the peaks are those of the requests."""
    check = check_history(history_of(*PLAIN))
    assert (check.difference, check.allocations, check.segment_events) == (None, 3, 2)
    assert (check.peak_allocated_bytes, check.peak_reserved_bytes) == (8 * MIB + 4096, 22 * MIB)


@pytest.mark.parametrize(
    ("place", "event", "words"),
    [
        (
            2,
            ("segment_alloc", BASE + 64 * MIB, 4 * MIB),
            "event 3 of 7: torch: segment_alloc of 4194304 bytes (4.00 MiB) at 0x7f0004000000; "
            "the simulator: segment_alloc of 20971520 bytes (20.00 MiB) at 0x7f0004000000",
        ),
        (
            4,
            ("alloc", BASE + 70 * MIB, 5 * MIB),
            "event 4 of 7: 5242880 bytes (5.00 MiB) asked for: torch's block is at 0x7f0004600000, "
            "the simulator's at 0x7f0004300000",
        ),
        (
            6,
            ("free_completed", BASE + 1, 3 * MIB),
            "event 6 of 7: a block at 0x7f0000000001 is freed that no recorded request got",
        ),
        (
            4,
            ("alloc", BASE + 67 * MIB, 18 * MIB),
            "event 4 of 7: the simulator asks CUDA for 18874368 bytes (18.00 MiB) of memory, torch did not",
        ),
        (
            6,
            ("oom", 0, 3 * MIB),
            "event 6 of 7: torch found no memory for 3145728 bytes (3.00 MiB), the simulator did",
        ),
        (
            6,
            ("segment_free", BASE, 2 * MIB),
            "event 7 of 7: torch: segment_free of 2097152 bytes (2.00 MiB) at 0x7f0000000000; "
            "the simulator: nothing",
        ),
    ],
)
def test_the_first_difference_is_named_in_words(place: int, event: tuple[str, int, int], words: str) -> None:
    """One event changed: the sentence names it, what torch did and what the simulator did."""
    changed = [*PLAIN]
    changed[place] = event
    assert check_history(history_of(*changed)).difference == words


def test_streams_have_segments_of_their_own() -> None:
    """A block that was freed serves its own stream alone: the other one takes a new segment."""
    first = (*PLAIN[2:4], *PLAIN[5:7])
    other = ("segment_alloc", BASE + 96 * MIB, 20 * MIB), ("alloc", BASE + 96 * MIB, 3 * MIB)
    history = history_of(*first, *other)
    assert check_history(history).difference is not None
    on_stream = (*history.events[:4], *(event._replace(stream=1) for event in history.events[4:]))
    assert check_history(replace(history, events=on_stream)).difference is None


def test_a_retry_is_followed_whoever_refused() -> None:
    """torch gives a cached segment back and retries, at its own limit or because CUDA has no more memory, as
    much as the whole GPU has or not.
    """
    events = (
        ("segment_alloc", BASE, 30 * MIB),
        ("alloc", BASE, 30 * MIB),
        ("free_completed", BASE, 30 * MIB),
        ("segment_free", BASE, 30 * MIB),
        ("segment_alloc", BASE + 100 * MIB, 40 * MIB),
        ("alloc", BASE + 100 * MIB, 40 * MIB),
        ("oom", 0, 20 * MIB),
    )
    assert check_history(history_of(*events, limit_bytes=50 * MIB)).difference is None
    check = check_history(history_of(*events))
    assert (check.difference, check.retries, check.ooms) == (None, 1, 1)
    assert check.refused_bytes == 60 * MIB


def test_memory_beyond_the_limit_differs() -> None:
    """torch would not have asked CUDA for it."""
    events = ("segment_alloc", BASE, 60 * MIB), ("alloc", BASE, 60 * MIB)
    assert check_history(history_of(*events)).difference is None
    assert check_history(history_of(*events, limit_bytes=50 * MIB)).difference is not None


@pytest.mark.parametrize(
    ("given_back", "words"),
    [
        (
            [("segment_free", BASE + 1, 30 * MIB)],
            "event 4 of 5: torch: segment_free of 31457280 bytes (30.00 MiB) at 0x7f0000000001; "
            "the simulator: segment_free of 31457280 bytes (30.00 MiB) at 0x7f0000000000",
        ),
        (
            [],
            "event 3 of 4: torch: nothing; "
            "the simulator: segment_free of 31457280 bytes (30.00 MiB) at 0x7f0000000000",
        ),
    ],
)
def test_what_is_given_back_before_memory_runs_out_is_compared(
    given_back: list[tuple[str, int, int]], words: str
) -> None:
    """Before it gives up torch releases what is cached: the right segment, and none less."""
    events = (
        ("segment_alloc", BASE, 30 * MIB),
        ("alloc", BASE, 30 * MIB),
        ("free_completed", BASE, 30 * MIB),
        *given_back,
        ("oom", 0, 60 * MIB),
    )
    assert check_history(history_of(*events, limit_bytes=50 * MIB)).difference == words


@pytest.mark.parametrize(("torch", "reused"), [("2.11.0+cu130", "newer"), ("2.12.0+cu130", "older")])
def test_a_history_is_replayed_by_its_version_of_torch(torch: str, reused: str) -> None:
    """The reused one of equal blocks has the lowest address before torch 2.12, later the oldest segment's."""
    older, newer = BASE + 100 * MIB, BASE
    events = (
        ("segment_alloc", older, 30 * MIB),
        ("alloc", older, 30 * MIB),
        ("segment_alloc", newer, 30 * MIB),
        ("alloc", newer, 30 * MIB),
        ("free_completed", older, 30 * MIB),
        ("free_completed", newer, 30 * MIB),
        ("alloc", {"older": older, "newer": newer}[reused], 30 * MIB),
    )
    assert check_history(replace(history_of(*events), torch=torch)).difference is None
    other = {"2.11.0+cu130": "2.12.0+cu130", "2.12.0+cu130": "2.11.0+cu130"}[torch]
    check = check_history(replace(history_of(*events), torch=other)).difference
    assert check is not None and "torch's block is at" in check


def made_by_simulator(seed: int, alloc_conf: str, limit_bytes: int | None, torch: str = "2.13.0") -> History:
    """Return torch's record of random requests, if its allocator were ours and CUDA's addresses jumped."""
    chance = random.Random(seed)
    places = iter(chance.sample(range(1, 4000), 3999))
    segments: list[SegmentEvent] = []
    allocator = CachingAllocator(
        MemoryLimits(
            1024 * MIB, limit_bytes, 1024 * MIB, parse_alloc_conf(alloc_conf, config_of_torch(torch))
        ),
        address_of=lambda size_bytes: next(places) * 2048 * MIB,
        segment_events=segments,
    )
    events: list[tuple[str, int, int]] = []
    alive = []
    for _ in range(120):
        if alive and chance.random() < 0.45:
            block, size_bytes = alive.pop(chance.randrange(len(alive)))
            events.append(("free_requested", block.address, size_bytes))
            events.append(("free_completed", block.address, size_bytes))
            allocator.free(block)
            continue
        size_bytes = chance.choice(
            (chance.randint(1, MIB), chance.randint(1, 12 * MIB), chance.randint(1, 60 * MIB))
        )
        got = allocator.malloc(size_bytes)
        events += segments
        segments.clear()
        if got is None:
            events.append(("oom", 0, size_bytes))
        else:
            events.append(("alloc", got.address, size_bytes))
            alive.append((got, size_bytes))
    return History(
        "GPU", torch, alloc_conf, 1024 * MIB, limit_bytes, tuple(HistoryEvent(*event) for event in events)
    )


@given(
    st.integers(0, 10**6),
    st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"]),
    st.sampled_from([None, 200 * MIB]),
    st.sampled_from(["2.11.0+cu130", "2.12.0+cu130"]),
)
def test_histories_of_the_simulator_replay_alike(
    seed: int, alloc_conf: str, limit_bytes: int | None, torch: str
) -> None:
    """A history made by our allocator has no difference, for any options, limits and addresses of CUDA."""
    history = made_by_simulator(seed, alloc_conf, limit_bytes, torch)
    check = check_history(history)
    assert check.difference is None
    assert check.segment_events == sum(event.action in SEGMENT_SIGNS for event in history.events)


@given(st.integers(0, 10**6), st.data())
def test_no_changed_segment_goes_unnoticed(seed: int, data: st.DataObject) -> None:
    """A segment event with another size is a difference."""
    history = made_by_simulator(seed, "", 200 * MIB)
    segments = [index for index, event in enumerate(history.events) if event.action in SEGMENT_SIGNS]
    index = data.draw(st.sampled_from(segments))
    event = history.events[index]
    changed = (
        *history.events[:index],
        event._replace(size_bytes=event.size_bytes + 512),
        *history.events[index + 1 :],
    )
    assert check_history(History("GPU", "2.13.0", "", 1024 * MIB, 200 * MIB, changed)).difference is not None


def test_a_history_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Save and load are inverse, and equal histories make equal bytes."""
    history = made_by_simulator(7, "max_split_size_mb:32", 200 * MIB)
    marked = History("G", "2", "", None, None, history.events, (HistoryMark(0, 0, Phase.SETUP),))
    streams = tuple(one._replace(stream=place % 3) for place, one in enumerate(history.events))
    of_streams = History("G", "2", "", None, None, streams)
    for number, one in enumerate((history, marked, of_streams)):
        first, second = tmp_path / f"{number}a.gz", tmp_path / f"{number}b.gz"
        save_history(one, first)
        save_history(one, second)
        assert load_history(first) == one
        assert first.read_bytes() == second.read_bytes()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz"] * 6


def test_a_broken_history_file_is_one_line(tmp_path: Path) -> None:
    """Cut short, no file, or something else: an error with the path, and the file stays as it is."""
    path = tmp_path / "a.history.json.gz"
    save_history(history_of(*PLAIN), path)
    whole = path.read_bytes()
    for content in (whole[:-9], b"", b"{}", whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(DataFileError) as broken:
            load_history(path)
        assert str(broken.value).startswith(f"{path}: broken allocator history: ")
        assert "\n" not in str(broken.value)
        assert path.read_bytes() == content
    with pytest.raises(DataFileError, match="cannot read the history"):
        load_history(tmp_path / "none")
