"""Histories that begin anywhere: the memory before them from the segments after them, and their replay."""

import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planner.allocator.blocks import Block, BlockState, SegmentEvent, SegmentState
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MIB, MemoryLimits, config_of_torch, parse_alloc_conf
from planner.allocator.history.check import check_history
from planner.allocator.history.history import MOST_EVENTS, History, HistoryEvent
from planner.allocator.history.published_file import (
    PublishedHistory,
    beginning_of,
    load_any_history,
    load_published,
    save_published,
)
from planner.allocator.history.snapshot_reader import load_snapshot, load_snapshots
from planner.allocator.history.start_state import UnequalStateError, start_before
from planner.errors import DataFileError
from planner.program.events import Site
from tests.helpers.structs import replace

BASE = 0x7F00_0000_0000
OLD = "2.6.0"  # in which addresses, which are recorded, order equal blocks


def used(address: int, size_bytes: int) -> BlockState:
    return BlockState(address, size_bytes, True)


def free(address: int, size_bytes: int) -> BlockState:
    return BlockState(address, size_bytes, False)


def history_of(
    *events: tuple[str, int, int], start: tuple[SegmentState, ...] = (), conf: str = ""
) -> History:
    return History("GPU", OLD, conf, None, None, tuple(HistoryEvent(*event) for event in events), start=start)


# ---- the state before


def test_a_block_that_was_there_takes_a_rest_too_small_to_split() -> None:
    """3 MiB of a request and half a MiB behind it were one block: the large pool has no free half MiB."""
    above = used(BASE + 7 * MIB // 2, 8 * MIB), free(BASE + 23 * MIB // 2, 17 * MIB // 2)
    end = [SegmentState(BASE, 20 * MIB, "large", (free(BASE, 7 * MIB // 2), *above))]
    events = [HistoryEvent("free_completed", BASE, 3 * MIB - 100)]
    assert start_before(events, end, config_of_torch(OLD)) == (
        SegmentState(BASE, 20 * MIB, "large", (used(BASE, 7 * MIB // 2), *above)),
    )


def test_a_segment_that_went_was_there_before() -> None:
    """What is released during the record was reserved before it, 2 MiB of it for small blocks."""
    events = [
        HistoryEvent("segment_free", BASE, 2 * MIB),
        HistoryEvent("segment_free", BASE + 64 * MIB, 4 * MIB, stream=3),
    ]
    assert start_before(events, [], config_of_torch(OLD)) == (
        SegmentState(BASE, 2 * MIB, "small", (free(BASE, 2 * MIB),)),
        SegmentState(BASE + 64 * MIB, 4 * MIB, "large", (free(BASE + 64 * MIB, 4 * MIB),), 3),
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (("alloc", BASE, 512), "no segment has the block at 0x7f0000000000 that was allocated"),
        (("segment_alloc", BASE + 1, 512), "the segment at 0x7f0000000001 came and is not there at the end"),
        (
            ("free_completed", BASE + 512, 512),
            "the block at 0x7f0000000200 was freed and is in use at the end",
        ),
        (("free_completed", BASE + 8 * MIB, 512), "1 blocks that were there before are in no segment"),
        (
            ("segment_map", BASE + 2 * MIB, 512),
            "the pages at 0x7f0000200000 were mapped and are not there at the end",
        ),
    ],
)
def test_segments_of_another_moment_are_refused(event: tuple[str, int, int], words: str) -> None:
    """Events that cannot have led to the segments are named."""
    end = [
        SegmentState(
            BASE,
            2 * MIB,
            "small",
            (free(BASE, 512), used(BASE + 512, 512), free(BASE + 1024, 2 * MIB - 1024)),
        )
    ]
    with pytest.raises(UnequalStateError) as caught:
        start_before([HistoryEvent(*event)], end, config_of_torch(OLD))
    assert str(caught.value) == words


def recorded(
    seed: int, conf: str, capacity_bytes: int | None
) -> tuple[list[HistoryEvent], list[int], list[tuple[SegmentState, ...]]]:
    """Return the record of random requests, where each of them ends in it, and the segments at each end."""
    chance = random.Random(seed)
    places = iter(chance.sample(range(1, 4000), 3999))
    made: list[SegmentEvent] = []
    limits = MemoryLimits(capacity_bytes, None, None, parse_alloc_conf(conf, config_of_torch(OLD)))
    allocator = CachingAllocator(limits, lambda _: next(places) * 4096 * MIB, made)
    events: list[HistoryEvent] = []
    ends, states = [0], [allocator.snapshot()]
    alive: list[tuple[Block, int, int]] = []
    streams: dict[int, int] = {}

    def of_segment(one: SegmentEvent, stream: int) -> HistoryEvent:
        return HistoryEvent(*one, stream=streams.setdefault(one.address, stream))

    for _ in range(150):
        turn = chance.random()
        stream = chance.choice([0, 0, 0, 1])
        if turn < 0.04:
            allocator.empty_cache()
            events += [of_segment(one, stream) for one in made]
        elif alive and turn < 0.45:
            block, size_bytes, stream = alive.pop(chance.randrange(len(alive)))
            allocator.free(block)
            events.append(HistoryEvent("free_completed", block.address, size_bytes, stream=stream))
        else:
            size_bytes = chance.choice(
                (chance.randint(1, MIB), chance.randint(1, 12 * MIB), chance.randint(1, 60 * MIB))
            )
            got = allocator.malloc(size_bytes, stream)
            events += [of_segment(one, stream) for one in made]
            if got is None:
                events.append(HistoryEvent("oom", 0, size_bytes, stream=stream))
            else:
                events.append(HistoryEvent("alloc", got.address, size_bytes, stream=stream))
                alive.append((got, size_bytes, stream))
        made.clear()
        ends.append(len(events))
        states.append(allocator.snapshot())
    return events, ends, states


@given(
    st.integers(0, 10**6),
    st.sampled_from(["", "max_split_size_mb:32", "roundup_power2_divisions:4"]),
    st.sampled_from([None, 300 * MIB]),
    st.integers(0, 149),
)
def test_a_history_cut_anywhere_is_replayed_to_its_end(
    seed: int, conf: str, capacity_bytes: int | None, cut: int
) -> None:
    """Without the events before a cut and without the capacity, the rest replays, refusals included."""
    events, ends, states = recorded(seed, conf, capacity_bytes)
    rest = tuple(events[ends[cut] :])
    start = start_before(rest, states[-1], parse_alloc_conf(conf))
    held = [(one.address, one.size_bytes, one.stream) for one in start]
    assert held == [(one.address, one.size_bytes, one.stream) for one in states[cut]]
    # What was freed may have had a free neighbour that nothing tells apart from its own rest.
    check = check_history(History("GPU", OLD, conf, None, None, rest, start=states[cut]))
    assert check.difference is None
    assert check.allocations == sum(event.action == "alloc" for event in rest)
    assert check.ooms == sum(event.action == "oom" for event in rest)


@given(st.integers(0, 10**6), st.integers(0, 149))
def test_expandable_segments_cut_anywhere_are_replayed(seed: int, cut: int) -> None:
    """Pages that are held before the cut are those of ranges whose size only their distance tells."""
    conf = "expandable_segments:True"
    events, ends, states = recorded(seed, conf, 2**40)
    one_stream = [event for event in events if event.action != "segment_unmap"]
    if len(one_stream) < len(events):
        return  # where the first pages are unmapped at the cut, nothing tells where the range begins
    rest = tuple(events[ends[cut] :])
    start = start_before(rest, states[-1], parse_alloc_conf(conf))
    assert start == states[cut]
    assert check_history(History("GPU", OLD, conf, None, None, rest, start=start)).difference is None


# ---- the replay


START = (SegmentState(BASE, 20 * MIB, "large", (used(BASE, 3 * MIB), free(BASE + 3 * MIB, 17 * MIB))),)


def test_the_peaks_count_what_was_there_before() -> None:
    """3 MiB in use and 20 MiB reserved before the first event count in both peaks."""
    check = check_history(
        history_of(("alloc", BASE + 3 * MIB, 4 * MIB), ("free_completed", BASE, 3 * MIB), start=START)
    )
    assert (check.difference, check.allocations, check.frees) == (None, 1, 1)
    assert (check.peak_allocated_bytes, check.peak_reserved_bytes) == (7 * MIB, 20 * MIB)


CACHED = (SegmentState(BASE, 30 * MIB, "large", (free(BASE, 30 * MIB),)),)


def test_a_refusal_is_taken_from_the_record() -> None:
    """Released and then requested at once, where the level was never reached: CUDA refused 70 MiB."""
    check = check_history(
        history_of(
            ("segment_free", BASE, 30 * MIB),
            ("segment_alloc", BASE + 64 * MIB, 40 * MIB),
            ("alloc", BASE + 64 * MIB, 40 * MIB),
            ("oom", 0, 20 * MIB),
            start=CACHED,
        )
    )
    assert (check.difference, check.retries, check.emptied, check.ooms) == (None, 1, 0, 1)
    assert (check.peak_reserved_bytes, check.refused_bytes) == (40 * MIB, 60 * MIB)


@pytest.mark.parametrize(
    "after",
    [
        (("segment_alloc", BASE, 30 * MIB), ("alloc", BASE, 30 * MIB)),  # the cached block would have served
        (  # 70 MiB were granted later
            *(("segment_alloc", BASE, 40 * MIB), ("alloc", BASE, 40 * MIB)),
            *(("segment_alloc", BASE + 64 * MIB, 30 * MIB), ("alloc", BASE + 64 * MIB, 30 * MIB)),
        ),
        (),
    ],
)
def test_an_emptied_cache_is_told_from_a_refusal(after: tuple[tuple[str, int, int], ...]) -> None:
    """A cached block that serves, a higher level at another time, or no request: `empty_cache` was called."""
    check = check_history(history_of(("segment_free", BASE, 30 * MIB), *after, start=CACHED))
    assert (check.difference, check.retries, check.emptied, check.refused_bytes) == (None, 0, 1, None)


def test_segments_expand_without_a_known_total() -> None:
    """A second pool's pages lie 80 MiB on: a range is no larger than that."""
    events = (
        ("segment_map", BASE, 20 * MIB),
        ("alloc", BASE, 3 * MIB),
        ("segment_map", BASE + 80 * MIB, 2 * MIB),
        ("alloc", BASE + 80 * MIB, 512),
        ("segment_map", BASE + 20 * MIB, 20 * MIB),
        ("alloc", BASE + 3 * MIB, 20 * MIB),
    )
    assert check_history(history_of(*events, conf="expandable_segments:True")).difference is None


def test_a_segment_that_torch_did_not_ask_for_is_a_difference() -> None:
    """Without a total the simulator may not run out where torch was served from its cache."""
    check = check_history(history_of(("alloc", BASE + 4 * MIB, 18 * MIB), start=START))
    assert check.difference == (
        "event 0 of 1: the simulator asks CUDA for 18874368 bytes (18.00 MiB) of memory, torch did not"
    )


# ---- snapshots and files


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "frames": []}


def segment(address: int, size: int, blocks: list[tuple[int, str]], **more: object) -> dict[str, object]:
    sizes = [{"size": one, "state": state, "requested_size": one} for one, state in blocks]
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": "large",
        "blocks": sizes,
    } | more


def test_a_snapshot_has_a_history_for_each_device(tmp_path: Path) -> None:
    """Each begins with its own segments; streams are numbered by their handles, the default one first."""
    path = tmp_path / "snapshot.pickle"
    segments = [
        segment(BASE, 20 * MIB, [(3 * MIB, "active_allocated"), (17 * MIB, "inactive")]),
        segment(BASE, 2 * MIB, [(2 * MIB, "inactive")], device=2, segment_type="small", stream=9000),
    ]
    traces = [
        [entry("alloc", BASE, 3 * MIB)],
        [],
        [entry("free_requested", BASE, 700, 9000), entry("free_completed", BASE, 700, 9000)],
    ]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": traces}))
    first, second = load_snapshots(path)
    assert (first.gpu, first.start, first.notes) == (
        "GPU 0",
        (SegmentState(BASE, 20 * MIB, "large", (free(BASE, 20 * MIB),)),),
        (),
    )
    assert (second.gpu, second.events[0].stream) == ("GPU 2", 1)
    assert second.start == (
        SegmentState(BASE, 2 * MIB, "small", (used(BASE, 1024), free(BASE + 1024, 2 * MIB - 1024)), 1),
    )
    assert load_snapshot(path).notes == ("the snapshot has 1 more devices, which are left out",)


def test_segments_of_a_later_moment_are_noted(tmp_path: Path) -> None:
    """If the segments are not those after the last event, the record is read without a state before it."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry("alloc", BASE, 512)]]}))
    history = load_snapshot(path)
    assert (history.start, history.notes) == (
        (),
        (
            "the segments of the snapshot are not those after its last event: no segment has the block at "
            "0x7f0000000000 that was allocated",
        ),
    )


def test_a_published_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Events, streams, sites and the memory before them are kept; equal histories make equal bytes."""
    history = replace(
        history_of(("alloc", BASE + 3 * MIB, 4 * MIB), start=START), sites=(Site("net.py:3", "forward"),)
    )
    history = replace(history, events=(history.events[0]._replace(site=0, stream=2),))
    published = PublishedHistory("a-net", "", "training", history)
    path, other = tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    save_published(published, path)
    save_published(published, other)
    assert load_published(path) == published
    assert load_any_history(path) == history
    assert path.read_bytes() == other.read_bytes()
    assert beginning_of(history) == "empty cache"


def test_a_history_too_long_to_be_read_is_not_written(tmp_path: Path) -> None:
    """More events than a file may hold are refused before anything is written."""
    path = tmp_path / "a.json.gz"
    history = replace(history_of(), events=(HistoryEvent("snapshot", 0, 0),) * (MOST_EVENTS + 1))
    with pytest.raises(DataFileError, match="a history of 400001 events is not written; record fewer steps"):
        save_published(PublishedHistory("", "", "", history), path)
    assert not path.exists()


def test_a_broken_published_file_is_one_line(tmp_path: Path) -> None:
    """Cut short or with a hole between its blocks: an error with the path."""
    path = tmp_path / "a.json.gz"
    hole = (SegmentState(BASE, 20 * MIB, "large", (used(BASE + 512, 20 * MIB - 512),)),)
    save_published(PublishedHistory("", "", "", history_of(start=hole)), path)
    with pytest.raises(DataFileError, match="broken published history: segments_at_start: the blocks of"):
        load_published(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataFileError, match="broken published history: it is cut short; fetch it again"):
        load_published(path)
