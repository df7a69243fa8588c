"""Two traces become one for every batch size, or a sentence says where they part."""

from dataclasses import replace

import pytest
from handmade import SITES, UNTIMED, affine_traces, alloc, taken_at
from hypothesis import given
from hypothesis import strategies as st

from planner.affine import align, confirm
from planner.events import Alloc, Event, Free, Mark, Phase, Role, Site, Trace


def trace(batch: int, *events: Event, sites: tuple[Site, ...] = SITES) -> Trace:
    return Trace(events, sites, (batch,))


BASE = (
    Mark(1, Phase.FORWARD),
    Alloc(0, 2048, 0, Role.INPUT, 0),
    Alloc(1, 4096, 0, Role.ACTIVATION, 1),
    Free(0),
    Mark(1, Phase.BACKWARD),
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
    assert confirm(affine, taken_at(affine, batch)) == replace(affine, batches=(2, 3, batch))


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
            Alloc(1, 4096, 0, Role.ACTIVATION, 2),
            "event 2 is aten.convolution in features.0 taking block 1 for activations at batch 2 and "
            "aten.addmm in classifier taking block 1 for activations at batch 3",
        ),
        (
            1,
            Alloc(7, 2048, 0, Role.INPUT, 0),
            "event 1 is to in the loop taking block 0 for inputs at batch 2 and "
            "to in the loop taking block 7 for inputs at batch 3",
        ),
        (
            2,
            Alloc(1, 4096, 0, Role.TEMPORARY, 1),
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
            Alloc(2, 512, 0, Role.WORKSPACE, 2),
            "event 3 is block 0 of to in the loop given back at batch 2 and "
            "aten.addmm in classifier taking block 2 for workspaces at batch 3",
        ),
        (
            4,
            Mark(2, Phase.BACKWARD),
            "event 4 is the mark of step 1, backward at batch 2 and the mark of step 2, backward at batch 3",
        ),
        (
            0,
            Free(0),
            "event 0 is the mark of step 1, forward at batch 2 and "
            "block 0 of to in the loop given back at batch 3",
        ),
    ],
    ids=["site", "block", "role", "which freed", "free or alloc", "mark", "mark or free"],
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
    first = trace(2, alloc(0, 512), Alloc(1, low_bytes, 0, Role.ACTIVATION, 1))
    second = trace(4, alloc(0, 512), Alloc(1, high_bytes, 0, Role.ACTIVATION, 1))
    assert align(first, second) == (
        f"event 1: block 1 (aten.convolution in features.0) takes {low_bytes} bytes at batch 2 and "
        f"{high_bytes} at batch 4: {flaw}"
    )


def test_confirm_refuses_a_parabola() -> None:
    """A size that two batch sizes take for a line is found out by the third."""

    def at(batch: int) -> Trace:
        return trace(batch, alloc(0, 512), Alloc(1, batch * batch + 10 * batch, 0, Role.ACTIVATION, 1))

    affine = align(at(2), at(3))
    assert isinstance(affine, Trace)
    assert confirm(affine, at(4)) == (
        "event 1: block 1 (aten.convolution in features.0) takes 56 bytes at batch 4, "
        "not 54 as the line through batches 2 and 3 says"
    )


def test_confirm_refuses_other_events() -> None:
    """A third trace with other events is refused as a second one would be."""
    affine = Trace(BASE, SITES, (2, 3))
    assert confirm(affine, trace(9, *BASE[:3], Free(1), BASE[4])) == (
        "event 3 is block 0 of to in the loop given back at batches 2 and 3 and "
        "block 1 of aten.convolution in features.0 given back at batch 9"
    )


def test_one_batch_size_is_no_line() -> None:
    """Two traces of one batch size are a mistake of the caller, no answer."""
    with pytest.raises(ValueError, match="both traces were taken at batch 2"):
        align(trace(2, *BASE), trace(2, *BASE))
