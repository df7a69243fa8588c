"""What makes a trace trustworthy: every flaw that `check` refuses, in traces of a few events."""

import pytest
from hypothesis import given

from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Trace, check
from tests.helpers.traces import SITES, UNTIMED, affine_traces, alloc, taken_at

WHOLE: tuple[Event, ...] = (
    PhaseStart(0, Phase.SETUP),
    alloc(0, 512, role=Category.PARAMETER),
    PhaseStart(1, Phase.FORWARD),
    alloc(1, 1024),
    Free(1),
    PhaseStart(1, Phase.END),
)


@pytest.mark.parametrize(
    ("events", "batches", "flaw"),
    [
        ((alloc(0, 512), Free(0), alloc(0, 512)), (4,), "event 2: block 0 is born twice"),
        ((alloc(0, 512), alloc(1, 512), alloc(1, 512)), (4,), "event 2: block 1 is born twice"),
        ((alloc(0, 512), Free(1), Free(0)), (4,), "event 1: block 1 dies without living"),
        ((Free(0), alloc(0, 512), alloc(1, 512)), (4,), "event 0: block 0 dies without living"),
        ((alloc(0, 512), Free(0), Free(0)), (4,), "event 2: block 0 dies without living"),
        ((alloc(0, 512), alloc(1, 0), Free(0)), (4,), "event 1: block 1 has no positive size"),
        ((alloc(0, 512), alloc(1, -512), Free(0)), (4,), "event 1: block 1 has no positive size"),
        (
            (alloc(0, -20, 20), alloc(1, -60, 30), Free(0)),
            (2, 3),
            "event 1: block 1 has no positive size",
        ),
        (
            (alloc(0, -20, 20), alloc(1, -40, 30), Free(0)),
            (2, 3),
            "event 1: the size of block 1 is negative at some batch",
        ),
        (
            (alloc(0, 90), alloc(1, 90, -20), Free(0)),
            (2, 3),
            "event 1: the size of block 1 is negative at some batch",
        ),
        (
            (alloc(0, 512), PhaseStart(1, Phase.END), Free(0)),
            (4,),
            "event 2: something happens after the end",
        ),
        (
            (alloc(0, 512), alloc(1, 512, 4), Free(0)),
            (4,),
            "event 1: sizes per sample in a trace of one batch size",
        ),
        (
            (alloc(0, 512), Alloc(1, 512, 0, Category.INPUT, 3), Free(0)),
            (4,),
            "event 1: there is no site 3",
        ),
        (
            (alloc(0, 512), Alloc(1, 512, 0, Category.INPUT, -1), Free(0)),
            (4,),
            "event 1: there is no site -1",
        ),
        (
            (
                PhaseStart(1, Phase.FORWARD),
                alloc(0, 512),
                PhaseStart(2, Phase.INPUTS),
                PhaseStart(1, Phase.FORWARD),
            ),
            (4,),
            "event 3: step 1 comes after step 2",
        ),
        ((PhaseStart(-1, Phase.SETUP), alloc(0, 512), Free(0)), (4,), "event 0: step -1 comes after step 0"),
        (WHOLE, (), "batch sizes () are no positive numbers"),
        (WHOLE, (0,), "batch sizes (0,) are no positive numbers"),
        (WHOLE, (2, -3), "batch sizes (2, -3) are no positive numbers"),
    ],
)
def test_flaws(events: tuple[Event, ...], batches: tuple[int, ...], flaw: str) -> None:
    """A flawed trace is refused with the first event that is wrong and what is wrong with it."""
    with pytest.raises(ValueError) as caught:
        check(Trace(events, SITES, batches))
    assert str(caught.value) == flaw


@pytest.mark.parametrize("batches", [(4,), (2, 3), (2, 3, 128)])
def test_whole_trace(batches: tuple[int, ...]) -> None:
    """A trace without a flaw passes; phases and steps may repeat, and blocks may outlive the trace."""
    check(Trace(WHOLE, SITES, batches))


def test_affine_by_number_of_batches() -> None:
    """A trace of one batch size holds there only, one of several holds everywhere."""
    assert [Trace(WHOLE, SITES, batches).is_affine for batches in ((4,), (2, 3), (2, 3, 9))] == [
        False,
        True,
        True,
    ]


@UNTIMED
@given(affine_traces())
def test_random_traces_are_whole(trace: Trace) -> None:
    """The random traces of the other tests have no flaw, as affine ones and at a batch size."""
    check(trace)
    check(taken_at(trace, 7))
