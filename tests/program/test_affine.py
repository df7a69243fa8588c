"""Two traces become one for every batch size, or a sentence says where they part."""

import pytest
from hypothesis import given, strategies as st

from planner.allocator.replay import replay_trace
from planner.program.affine import align, refit
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace, check
from tests.helpers.structs import replace
from tests.helpers.traces import SITES, UNTIMED, affine_traces, alloc, taken_at


def trace(batch: int, *events: Event, sites: tuple[Site, ...] = SITES) -> Trace:
    return Trace(events, sites, (batch,))


BASE = (
    PhaseStart(1, Phase.FORWARD),
    Alloc(0, 2048, 0, Category.INPUT, 0),
    Alloc(1, 4096, 0, Category.ACTIVATION, 1),
    Free(0),
    PhaseStart(1, Phase.BACKWARD),
)


@UNTIMED
@given(affine_traces(), st.integers(1, 40), st.integers(1, 40))
def test_recovers_lines(affine: Trace, low: int, distance: int) -> None:
    """The traces of an affine job at any two batch sizes, in either order, give all its lines back."""
    first, second = taken_at(affine, low), taken_at(affine, low + distance)
    assert align(first, second) == replace(affine, batches=(low, low + distance))
    assert align(second, first) == replace(affine, batches=(low + distance, low))


@UNTIMED
@given(affine_traces(), st.integers(1, 10**6))
def test_confirms_the_same_job(affine: Trace, batch: int) -> None:
    """A third trace of an affine job changes nothing but the list of batch sizes."""
    batches = (2, 3) if batch in (2, 3) else (2, 3, batch)
    assert refit(affine, taken_at(affine, batch)) == replace(affine, batches=batches)


def test_lines_by_hand() -> None:
    """Sizes that stay, grow from nothing, grow from a base, and vanish at batch 1 become their lines."""
    sizes = {2: (512, 800, 900, 64), 3: (512, 1200, 1300, 128)}
    first, second = (trace(batch, *map(alloc, range(4), sizes[batch])) for batch in (2, 3))
    assert align(first, second) == Trace(
        events=(alloc(0, 512, 0), alloc(1, 0, 400), alloc(2, 100, 400), alloc(3, -64, 64)),
        sites=SITES,
        batches=(2, 3),
    )


def test_sites_are_compared_by_what_they_name() -> None:
    """Two traces that number their sites differently align."""
    second = trace(3, *(replace(e, site=2 - e.site) if isinstance(e, Alloc) else e for e in BASE))
    second = replace(second, sites=SITES[::-1])
    assert align(trace(2, *BASE), second) == Trace(BASE, SITES, (2, 3))


@pytest.mark.parametrize(
    ("place", "event", "sentence"),
    [
        (
            2,
            Alloc(1, 4096, 0, Category.ACTIVATION, 2),
            "event 2 is aten.convolution in features.0 taking block 1 for activations at batch 2 and "
            "aten.addmm in classifier taking block 1 for activations at batch 3",
        ),
        (
            2,
            Alloc(1, 4096, 0, Category.TEMPORARY, 1),
            "event 2 is aten.convolution in features.0 taking block 1 for activations at batch 2 and "
            "aten.convolution in features.0 taking block 1 for temporaries at batch 3",
        ),
        (
            3,
            Free(1),
            "event 3 is block 0 of to in the loop given back at batch 2 and "
            "block 1 of aten.convolution in features.0 given back at batch 3",
        ),
        (
            3,
            Alloc(2, 512, 0, Category.WORKSPACE, 2),
            "event 3 is block 0 of to in the loop given back at batch 2 and "
            "aten.addmm in classifier taking block 2 for workspaces at batch 3",
        ),
        (
            4,
            PhaseStart(2, Phase.BACKWARD),
            "event 4 is the mark of step 1, backward at batch 2 and the mark of step 2, backward at batch 3",
        ),
        (
            0,
            Free(0),
            "event 0 is the mark of step 1, forward at batch 2 and "
            "block 0 of to in the loop given back at batch 3",
        ),
    ],
    ids=["site", "role", "which freed", "free or alloc", "mark", "mark or free"],
)
def test_different_events(place: int, event: Event, sentence: str) -> None:
    """Where two traces part, the sentence names the event and what it is in each of them."""
    other = (*BASE[:place], event, *BASE[place + 1 :])
    assert align(trace(2, *BASE), trace(3, *other)) == sentence


def test_different_lengths() -> None:
    """Where one trace ends early, the sentence names the first event that it lacks."""
    sentence = (
        "event 3 at batch {} is block 0 of to in the loop given back; "
        "the trace at batch {} has ended before it"
    )
    assert align(trace(2, *BASE), trace(3, *BASE[:3])) == sentence.format(2, 3)
    assert align(trace(2, *BASE[:3]), trace(3, *BASE)) == sentence.format(3, 2)


@pytest.mark.parametrize(
    ("low_bytes", "high_bytes", "flaw"),
    [
        (2048, 2049, "no whole number of bytes per sample"),
        (2049, 2048, "no whole number of bytes per sample"),
        (2048, 2046, "no line that holds for every batch"),  # less with more samples
        (2048, 8192, "no line that holds for every batch"),  # negative at batch 1
    ],
)
def test_no_line(low_bytes: int, high_bytes: int, flaw: str) -> None:
    """A size that is no line through whole bytes for every batch size is refused with its place."""
    first = trace(2, alloc(0, 512), Alloc(1, low_bytes, 0, Category.ACTIVATION, 1))
    second = trace(4, alloc(0, 512), Alloc(1, high_bytes, 0, Category.ACTIVATION, 1))
    assert align(first, second) == (
        f"event 1: block 1 (aten.convolution in features.0) takes {low_bytes} bytes at batch 2 and "
        f"{high_bytes} at batch 4: {flaw}"
    )


def test_confirm_refuses_a_parabola() -> None:
    """A size that two batch sizes take for a line is found out by the third."""

    def at(batch: int) -> Trace:
        return trace(batch, alloc(0, 512), Alloc(1, batch * batch + 10 * batch, 0, Category.ACTIVATION, 1))

    affine = align(at(2), at(3))
    assert isinstance(affine, Trace)
    assert refit(affine, at(4)) == (
        "event 1: block 1 (aten.convolution in features.0) takes 56 bytes at batch 4, "
        "not 54 as the line through batches 2 and 3 says"
    )


def test_confirm_refuses_other_events() -> None:
    """A third trace with other events is refused as a second one would be."""
    affine = Trace(BASE, SITES, (2, 3))
    assert refit(affine, trace(9, *BASE[:3], Free(1), BASE[4])) == (
        "event 3 is block 0 of to in the loop given back at batches 2 and 3 and "
        "block 1 of aten.convolution in features.0 given back at batch 9"
    )


def test_one_batch_size_is_no_line() -> None:
    """Two traces of one batch size are a mistake of the caller, no answer."""
    with pytest.raises(ValueError, match="both traces were taken at batch 2"):
        align(trace(2, *BASE), trace(2, *BASE))


def with_scratch(sizes: tuple[int, ...], batch: int) -> Trace:
    """The base with scratch of these sizes, one after the other, before the second operator's output."""
    scratch: list[Event] = []
    for number, size in enumerate(sizes, 10):
        scratch += [Alloc(number, size, 0, Category.WORKSPACE, 1), Free(number)]
    return trace(batch, *BASE[:2], *scratch, *BASE[2:])


def test_scratch_that_follows_a_line_is_a_line() -> None:
    """Scratch that both batch sizes take alike, and that grows evenly, holds for every batch size."""
    assert align(with_scratch((1000, 64), 2), with_scratch((1500, 64), 3)) == Trace(
        (
            *BASE[:2],
            Alloc(10, 0, 500, Category.WORKSPACE, 1),
            Free(10),
            Alloc(11, 64, 0, Category.WORKSPACE, 1),
            Free(11),
            *BASE[2:],
        ),
        SITES,
        (2, 3),
    )


@pytest.mark.parametrize(
    ("low", "high"),
    [((), (512,)), ((512,), ()), ((1000,), (1001,)), ((2000,), (1000,)), ((512, 512), (512,))],
    ids=["only there", "only here", "half bytes", "less with more", "another number"],
)
def test_scratch_that_follows_none_is_that_of_the_second(low: tuple[int, ...], high: tuple[int, ...]) -> None:
    """Scratch that comes, goes, or is on no line stands as the second trace had it; the rest aligns."""
    if (low, high) == ((1000,), (1001,)):
        first, second, batches = with_scratch(low, 2), with_scratch(high, 4), (2, 4)
    else:
        first, second, batches = with_scratch(low, 2), with_scratch(high, 3), (2, 3)
    expected: list[Event] = []
    for number, size in enumerate(high, 2):  # names that come after those of the base
        expected += [Alloc(number, size, 0, Category.WORKSPACE, 1), Free(number)]
    assert align(first, second) == Trace((*BASE[:2], *expected, *BASE[2:]), SITES, batches)


def test_refit_takes_the_scratch_of_the_third() -> None:
    """Refitting changes the scratch alone, and changes nothing where it is as the line says."""
    affine = align(with_scratch((1000,), 2), with_scratch((1500,), 3))
    assert isinstance(affine, Trace)
    assert refit(affine, with_scratch((4500,), 9)) == replace(affine, batches=(2, 3, 9))
    assert refit(affine, with_scratch((4000, 512), 9)) == Trace(
        (
            *BASE[:2],
            Alloc(2, 4000, 0, Category.WORKSPACE, 1),
            Free(2),
            Alloc(3, 512, 0, Category.WORKSPACE, 1),
            Free(3),
            *BASE[2:],
        ),
        SITES,
        (2, 3, 9),
    )


def test_scratch_around_an_output_is_replaced_whole() -> None:
    """Scratch that is taken before an output and given back after it keeps its birth and death together."""

    def around(size: int, batch: int) -> Trace:
        held = Alloc(10, size, 0, Category.WORKSPACE, 1)
        return trace(batch, *BASE[:2], held, BASE[2], Free(10), *BASE[3:])

    def merged(block: Alloc) -> tuple[Event, ...]:
        return (*BASE[:2], block, BASE[2], Free(block.block), *BASE[3:])

    affine = align(around(1000, 2), around(1500, 3))
    assert affine == Trace(merged(Alloc(10, 0, 500, Category.WORKSPACE, 1)), SITES, (2, 3))
    changed = align(around(1500, 2), around(1000, 3))
    assert changed == Trace(merged(Alloc(2, 1000, 0, Category.WORKSPACE, 1)), SITES, (2, 3))


def test_workspace_that_is_kept_is_no_passing_scratch() -> None:
    """A workspace that is never given back has to be there in both traces."""
    kept = Alloc(10, 512, 0, Category.WORKSPACE, 1)
    other = trace(3, *BASE[:2], kept, *BASE[2:])
    assert align(trace(2, *BASE), other) == (
        "event 2 is aten.convolution in features.0 taking block 1 for activations at batch 2 and "
        "aten.convolution in features.0 taking block 10 for workspaces at batch 3"
    )


@UNTIMED
@given(affine_traces(), st.integers(2, 64), st.data())
def test_refitted_trace_replays_as_the_third(affine: Trace, batch: int, data: st.DataObject) -> None:
    """Whatever scratch each batch size takes, the refitted trace replays as the one it was refitted to."""

    def scratched(size: int) -> Trace:
        taken = taken_at(affine, size)
        scratch = data.draw(st.dictionaries(st.integers(0, len(taken.events)), st.integers(1, 2**22)))
        events: list[Event] = []
        for index, event in enumerate((*taken.events, None)):
            if index in scratch:
                events += [Alloc(1000 + index, scratch[index], 0, Category.WORKSPACE, 0), Free(1000 + index)]
            events += [] if event is None else [event]
        return replace(taken, events=tuple(events))

    third = scratched(batch)
    whole = align(scratched(2), scratched(3))
    assert isinstance(whole, Trace)
    refitted = refit(whole, third)
    assert isinstance(refitted, Trace)
    check(refitted)
    ours, theirs = replay_trace(refitted, batch), replay_trace(third, batch)
    assert replace(ours, peak_event=0) == replace(theirs, peak_event=0)
