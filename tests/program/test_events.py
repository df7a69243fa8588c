"""Every flaw that `validate` refuses, in traces of a few events."""

import pytest
from hypothesis import given

from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Trace, validate
from planner.program.program import AffineAlloc, Program, validate_program
from tests.helpers.traces import SITES, alloc, program_of, programs

WHOLE: tuple[Event, ...] = (
    PhaseStart(0, Phase.SETUP),
    alloc(0, 512, category=Category.PARAMETER),
    PhaseStart(1, Phase.FORWARD),
    alloc(1, 1024),
    Free(1),
    PhaseStart(1, Phase.END),
)


@pytest.mark.parametrize(
    ("events", "batch", "flaw"),
    [
        ((alloc(0, 512), Free(0), alloc(0, 512)), 4, "event 2: block 0 is allocated twice"),
        ((alloc(0, 512), alloc(1, 512), alloc(1, 512)), 4, "event 2: block 1 is allocated twice"),
        ((alloc(0, 512), Free(1), Free(0)), 4, "event 1: block 1 is freed without being allocated"),
        ((Free(0), alloc(0, 512), alloc(1, 512)), 4, "event 0: block 0 is freed without being allocated"),
        ((alloc(0, 512), Free(0), Free(0)), 4, "event 2: block 0 is freed without being allocated"),
        ((alloc(0, 512), alloc(1, 0), Free(0)), 4, "event 1: block 1 has no positive size"),
        ((alloc(0, 512), alloc(1, -512), Free(0)), 4, "event 1: block 1 has no positive size"),
        (
            (alloc(0, 512), PhaseStart(1, Phase.END), Free(0)),
            4,
            "event 2: something happens after the end",
        ),
        (
            (alloc(0, 512), Alloc(1, 512, Category.INPUT, 3), Free(0)),
            4,
            "event 1: there is no site 3",
        ),
        (
            (alloc(0, 512), Alloc(1, 512, Category.INPUT, -1), Free(0)),
            4,
            "event 1: there is no site -1",
        ),
        (
            (
                PhaseStart(1, Phase.FORWARD),
                alloc(0, 512),
                PhaseStart(2, Phase.INPUTS),
                PhaseStart(1, Phase.FORWARD),
            ),
            4,
            "event 3: step 1 comes after step 2",
        ),
        ((PhaseStart(-1, Phase.SETUP), alloc(0, 512), Free(0)), 4, "event 0: step -1 comes after step 0"),
        (WHOLE, 0, "batch size 0 is not positive"),
    ],
)
def test_flaws(events: tuple[Event, ...], batch: int, flaw: str) -> None:
    """A flawed trace is refused with the first event that is wrong and what is wrong with it."""
    with pytest.raises(ValueError) as caught:
        validate(Trace(events, SITES, batch))
    assert str(caught.value) == flaw


def test_whole_trace() -> None:
    """A trace without a flaw passes; phases and steps may repeat, and blocks may outlive the trace."""
    validate(Trace(WHOLE, SITES, 4))


@pytest.mark.parametrize(
    ("events", "flaw"),
    [
        (
            (alloc(0, -20, 20), alloc(1, -60, 30), Free(0)),
            "the size of block 1 is negative at some batch size",
        ),
        (
            (alloc(0, 90), AffineAlloc(1, 90, -20, Category.INPUT, 0)),
            "the size of block 1 is negative at some batch size",
        ),
        ((alloc(0, 90), alloc(1, -60, 60)), "not positive, or a block without bytes"),
        ((alloc(0, 90), alloc(0, 60)), "event 1: block 0 is allocated twice"),
    ],
)
def test_flaws_of_programs(events: tuple[Event, ...], flaw: str) -> None:
    """A program whose tensor events make no trace at some batch size is refused."""
    with pytest.raises(ValueError, match=flaw):
        validate_program(program_of(events), (1, 2))


@pytest.mark.slow
@given(programs())
def test_random_traces_are_whole(program: Program) -> None:
    """The random programs of the other tests have no flaw, nor do their traces."""
    validate_program(program, (2, 3))
    validate(program.instantiate(7))
