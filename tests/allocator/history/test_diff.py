"""A trace against a recorded history: what is aligned, what differs, and how it is shown."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, strategies as st

from planner.allocator.config import MIB, AllocatorConfig
from planner.allocator.history.diff import (
    Difference,
    Kind,
    LifetimeDifference,
    OpTotal,
    SidePeak,
    UnmatchedBlock,
    compare_with_recording,
)
from planner.allocator.history.lcs import align_rows
from planner.allocator.history.lifetimes import Recording
from planner.program.events import Alloc, Free, Phase, PhaseStart, Trace
from planner.program.program import Program
from planner.report.commands.explain.diff import difference_sections, group_extras
from planner.report.document import Document
from planner.report.plain import render_plain
from tests.helpers.histories import CONV, COPY, LITERAL, NORM, Block, Mark, blocks_of, events_of, marks_of
from tests.helpers.structs import replace
from tests.helpers.traces import programs

RULES = AllocatorConfig()

# ---- alignment


def longest(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common subsequence by the textbook's table."""
    row = [0] * (len(second) + 1)
    for one in first:
        above = row
        row = [0]
        for column, other in enumerate(second):
            row.append(above[column] + 1 if one == other else max(above[column + 1], row[column]))
    return row[-1]


_rows = st.lists(st.integers(0, 4), max_size=24)


@given(_rows, _rows, st.sampled_from([1, 7, 40, 2**30]))
def test_rows_are_aligned_as_far_as_they_can_be(first: list[int], second: list[int], most: int) -> None:
    """Pairs rise, are equal, and are as many as the textbook finds, however little memory there is."""
    pairs = align_rows(first, second, most)
    assert all(first[one] == second[other] for one, other in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in zip(pairs, pairs[1:], strict=False))
    assert len(pairs) == longest(first, second)


# ---- synthetic recordings


def recorded(blocks: Sequence[Block], marks: Sequence[Mark]) -> Recording:
    """Return the record of a GPU that did so."""
    return Recording("a GPU", RULES, events_of(blocks, marks), (), None)


def changed(
    blocks: Sequence[Block], marks: Sequence[Mark], dropped: set[int], added: dict[int, int]
) -> tuple[list[Block], list[Mark]]:
    """The blocks without some, and with others of these sizes that die at once, each before the block of its
    index.
    """
    new: list[tuple[Block, bool]] = []  # whether it is an old one
    place = []  # for each old count of births, the new one
    for index in range(len(blocks) + 1):
        if index in added:
            new.append(((added[index], len(new) + 1), False))
        place.append(len(new))
        if index < len(blocks) and index not in dropped:
            new.append((blocks[index], True))
    moved = [(size, place[end] if is_old and end is not None else end) for (size, end), is_old in new]
    # A mark stands before what is added at its place.
    return moved, [(place[at] - (at in added), mark) for at, mark in marks]


@pytest.mark.slow
@given(programs(), st.booleans())
def test_a_recording_of_the_trace_itself_has_no_difference(program: Program, marked: bool) -> None:
    """A recording with the trace's own blocks matches block by block, with marks and without.

    Blocks do not tell when a cache is emptied, nor their streams.
    """
    trace = program.instantiate(4)
    on_one = [replace(event, stream=0) if isinstance(event, Alloc) else event for event in trace.events]
    trace = replace(trace, events=tuple(on_one))
    assume(not any(isinstance(event, Free) and event.empties_cache for event in trace.events))
    difference = compare_with_recording(
        trace, recorded(blocks_of(trace.events), marks_of(trace.events) if marked else ())
    )
    assert difference.is_empty
    assert (difference.matched, difference.traced) == (difference.traced_allocations, difference.recorded)
    assert difference.traced.alone_bytes == 0


@given(programs(), st.data(), st.booleans())
def test_random_insertions_and_deletions_are_recovered(
    program: Program, data: st.DataObject, marked: bool
) -> None:
    """Blocks of sizes that the trace does not have are found where they were put, each with its size; of
    those taken away exactly the sizes are missed.
    """
    trace = program.instantiate(4)
    blocks = blocks_of(trace.events)
    count = len(blocks)
    indices = st.integers(0, max(count - 1, 0))
    dropped = data.draw(st.sets(indices, max_size=min(count, 6))) if count else set()
    added = data.draw(st.dictionaries(st.integers(0, count), st.integers(0, 10**6), max_size=6))
    added = {index: 2**50 + 512 * (size * 10 + number) for number, (index, size) in enumerate(added.items())}
    other, marks = changed(blocks, marks_of(trace.events) if marked else (), dropped, added)
    difference = compare_with_recording(trace, recorded(other, marks))
    sizes = [RULES.block_bytes(size) for size, _ in blocks]
    new = [extra for extra in difference.extras if extra.kind in (Kind.WORKSPACE, Kind.BLOCK)]
    missed = [extra for extra in difference.extras if extra.kind in (Kind.TENSOR, Kind.SCRATCH)]
    assert [extra.size_bytes for extra in new] == [added[index] for index in sorted(added)]
    assert [other[extra.birth][0] for extra in new] == [added[i] for i in sorted(added)]
    assert all(extra.kind is Kind.WORKSPACE for extra in new)
    assert sorted(extra.size_bytes for extra in missed) == sorted(sizes[index] for index in dropped)
    assert difference.matched == count - len(dropped)


MARKS = ((0, PhaseStart(1, Phase.INPUTS)), (1, PhaseStart(1, Phase.FORWARD)))


def against(*blocks: tuple[int, int | None], trace: Trace = LITERAL) -> Difference:
    return compare_with_recording(trace, Recording("a GPU", RULES, events_of(blocks, MARKS), (), 40 * MIB))


SAME = ((3 * MIB, None), (8 * MIB, None), (8 * MIB, 4), (1024, 4), (5 * MIB, None))


def test_a_workspace_is_named_by_the_operator_that_it_follows() -> None:
    """A block that dies before the next one of both, after a convolution's result, is its workspace."""
    difference = against(SAME[0], SAME[1], (6 * MIB, 3), (8 * MIB, 5), (1024, 5), SAME[4])
    assert difference == Difference(
        about="a GPU",
        traced_allocations=5,
        recorded_allocations=6,
        matched=5,
        phases=2,
        extras=(UnmatchedBlock(Kind.WORKSPACE, 2, 6 * MIB, 1, Phase.FORWARD, "a.conv", CONV, "", False),),
        lives=(),
        ops=(
            OpTotal(CONV, 2, 13 * MIB, 0, 0, 1, 6 * MIB),
            OpTotal(NORM, 2, 8 * MIB + 1024, 0, 0, 0, 0),
            OpTotal(COPY, 1, 3 * MIB, 0, 0, 0, 0),
        ),
        traced=SidePeak(20 * MIB + 1024, 22 * MIB, 0),
        recorded=SidePeak(20 * MIB + 1024, 40 * MIB, 0),
        notes=(),
    )


def test_after_a_death_a_block_belongs_to_the_next_operator() -> None:
    """A death shows that an operator has ended, so that what follows stands in the next one."""
    difference = against(*SAME[:4], (6 * MIB, 5), (5 * MIB, None))
    assert [(extra.kind, extra.op, extra.module) for extra in difference.extras] == [
        (Kind.WORKSPACE, CONV, "a.conv")
    ]


def test_a_block_that_lives_on_is_no_workspace() -> None:
    """A block that outlives blocks of both is reported as a block."""
    difference = against(SAME[0], SAME[1], (6 * MIB, None), (8 * MIB, 5), (1024, 5), SAME[4])
    assert [(extra.kind, extra.at_peak) for extra in difference.extras] == [(Kind.BLOCK, True)]
    assert difference.recorded.alone_bytes == 6 * MIB
    assert (difference.traced.allocated_bytes, difference.recorded.allocated_bytes) == (
        20 * MIB + 1024,
        25 * MIB + 1024,
    )


def test_what_the_gpu_does_not_make_is_a_tensor_or_scratch() -> None:
    """A traced block without a partner is reported as what the trace took it for."""
    difference = against(SAME[0], SAME[1], SAME[4])
    assert [(extra.kind, extra.birth, extra.op) for extra in difference.extras] == [
        (Kind.TENSOR, 2, NORM),
        (Kind.SCRATCH, 3, NORM),
    ]
    assert difference.traced.alone_bytes == 8 * MIB + 1024


def test_a_workspace_as_large_as_the_result_is_distinguished() -> None:
    """The result is, of two blocks of the same size, the one with the traced life."""
    difference = against(SAME[0], (8 * MIB, None), (8 * MIB, 3), (8 * MIB, 5), (1024, 5), SAME[4])
    assert [(extra.kind, extra.birth) for extra in difference.extras] == [(Kind.WORKSPACE, 2)]
    assert difference.lives == ()


def test_a_life_that_ends_elsewhere_is_reported() -> None:
    """A block that both have and that dies after one more birth than traced outlives it by one."""
    difference = against(SAME[0], SAME[1], (8 * MIB, None), SAME[3], SAME[4])
    assert difference.extras == ()
    assert difference.lives == (LifetimeDifference(2, 8 * MIB, 1, Phase.FORWARD, "a.norm", NORM, 1),)


def test_phases_are_aligned_each_by_itself() -> None:
    """A block of the right size in the wrong phase has no partner."""
    difference = against((8 * MIB, None), (3 * MIB, None), (8 * MIB, 4), (1024, 4), (5 * MIB, None))
    assert [(extra.kind, extra.phase, extra.size_bytes) for extra in difference.extras] == [
        (Kind.BLOCK, Phase.INPUTS, 8 * MIB),
        (Kind.TENSOR, Phase.INPUTS, 3 * MIB),
        (Kind.BLOCK, Phase.FORWARD, 3 * MIB),
        (Kind.TENSOR, Phase.FORWARD, 8 * MIB),
    ]


def test_an_empty_recording_lacks_everything() -> None:
    """Without a single recorded block all traced ones are reported."""
    difference = against()
    assert (difference.matched, len(difference.extras), difference.recorded.allocated_bytes) == (0, 5, 0)


def difference_text(difference: Difference, top: int) -> str:
    return render_plain(Document.of(*difference_sections(difference, top)))


def test_repeated_extras_are_reported_once() -> None:
    """Equal extras of several steps are one group, and the text states which steps."""
    extra = UnmatchedBlock(
        Kind.WORKSPACE, 2, 6 * MIB, 1, Phase.FORWARD, "a.conv", CONV, "net.py:3 forward", False
    )
    steps = tuple(replace(extra, step=step) for step in (1, 2, 3))
    smaller = replace(extra, size_bytes=512, step=2)
    difference = replace(against(*SAME), extras=(*steps, smaller))
    groups = group_extras(difference)
    assert [(group.size_bytes, group.steps, group.bytes) for group in groups] == [
        (6 * MIB, (1, 2, 3), 18 * MIB),
        (512, (2,), 512),
    ]
    text = difference_text(difference, 1)
    assert "forward, convolution in a.conv, steps 1 to 3 (net.py:3 forward)" in " ".join(text.split())
    assert "\nand 1 more, 0.00 MiB in all; --top shows them\n" in text
    assert "  - workspace: recorded, gone before the next block that both have" in text


def test_a_model_that_was_there_before_the_recording_is_one_line() -> None:
    """The blocks of the set-up that a late recording lacks are summed up."""
    parameters = [
        UnmatchedBlock(Kind.TENSOR, index, 512 * index, 0, Phase.SETUP, "a", "to", "", True)
        for index in (1, 2, 3)
    ]
    text = " ".join(difference_text(replace(against(*SAME), extras=tuple(parameters)), 5).split())
    assert "tensor 0.00 in all 3 blocks of the model as it is placed on the GPU: did the recording" in text
    assert "setup, to" not in text


def test_sameness_is_reported() -> None:
    """If there is nothing to report, the text notes it."""
    text = difference_text(against(*SAME), 5)
    assert text.endswith("\n\nTrace and recording are the same, block by block")
