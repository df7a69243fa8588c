"""Traces cut into pieces: literal events in, pieces out; pieces joined again are the trace."""

import pytest

from planner.capture.session import record
from planner.jobs.files.catalogue import load_catalogue
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Trace
from planner.program.pieces import FIRST_LASTING, Joiner, NotJoinedError, cut_trace, is_periodic
from tests.helpers.models import AMPERE
from tests.helpers.traces import SITES, alloc

SETUP: tuple[Event, ...] = (PhaseStart(0, Phase.SETUP), Alloc(0, 30, Category.PARAMETER, 0))
STEP_1: tuple[Event, ...] = (
    PhaseStart(1, Phase.INPUTS),
    Alloc(1, 12, Category.INPUT, 0),
    PhaseStart(1, Phase.FORWARD),
    Alloc(2, 7, Category.WORKSPACE, 0),  # given back
    Free(2),
    Alloc(3, 8, Category.WORKSPACE, 0),  # not given back
    Alloc(4, 3, Category.TEMPORARY, 0),
)
STEP_2: tuple[Event, ...] = (
    PhaseStart(2, Phase.INPUTS),
    Free(1),
    Alloc(5, 12, Category.INPUT, 0),
    PhaseStart(2, Phase.FORWARD),
    Alloc(6, 3, Category.TEMPORARY, 0),
    Free(4),
    Free(0),
)


def test_a_piece_names_the_variables_of_other_batches() -> None:
    """Blocks that outlive their piece have a category and a number; frees say how old they are."""
    trace = Trace((*SETUP, *STEP_1, *STEP_2, PhaseStart(2, Phase.END)), SITES, 2)
    (setup,), (first,), (second,) = cut_trace(trace)
    assert [piece.trace.events for piece in (setup, first, second)] == [SETUP, STEP_1, STEP_2]
    assert setup.lasting == ((1, (Category.PARAMETER, 0)),)
    assert (
        first.lasting
        == ((6, (Category.TEMPORARY, 0)), (5, (Category.WORKSPACE, 0)), (1, (Category.INPUT, 0)))[::-1]
    )
    assert second.freed == (
        (1, 1, (Category.INPUT, 0)),
        (5, 1, (Category.TEMPORARY, 0)),
        (6, -1, (Category.PARAMETER, 0)),
    )
    assert (first.starts, second.starts) == ((0, 2), (0, 3))


def looping(*sizes: int) -> Trace:
    """Return a loop whose steps request one block each."""
    steps = (
        (PhaseStart(number, Phase.INPUTS), alloc(number, size), Free(number))
        for number, size in enumerate(sizes, 1)
    )
    return Trace(tuple(event for step in steps for event in step), SITES, 1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, 2, 2), True), ((1, 2, 3), False), ((1,), False), ((2, 2, 1), False), ((), False)],
)
def test_a_loop_is_periodic_if_its_last_two_steps_are_equal(sizes: tuple[int, ...], expected: bool) -> None:
    """A loop whose last two steps differ, or that has one step, shows nothing about later steps."""
    assert is_periodic(cut_trace(looping(*sizes))) == expected


def test_a_trace_of_no_steps_is_its_setup() -> None:
    """A trace without steps has one piece."""
    ((setup,),) = cut_trace(Trace((alloc(0, 5), Free(0)), SITES, 1))
    assert (setup.trace.events, setup.lasting, setup.freed) == ((alloc(0, 5), Free(0)), (), ())


def test_a_piece_that_frees_what_nothing_holds_is_not_joined() -> None:
    """The second step frees an input of the first, which was not played."""
    (setup,), _, (second,) = cut_trace(Trace((*SETUP, *STEP_1, *STEP_2), SITES, 2))
    joiner = Joiner()
    assert joiner.join(setup, 0).events[1] == Alloc(FIRST_LASTING, 30, Category.PARAMETER, 0)
    with pytest.raises(NotJoinedError):
        joiner.join(second, 1)


def story(events: tuple[Event, ...]) -> list[object]:
    """Return the events with blocks named by the order of their allocation."""
    order: dict[int, int] = {}
    told: list[object] = []
    for number, event in enumerate(events):
        if isinstance(event, Alloc):
            order[event.block] = number
            told.append((event.size_bytes, event.may_fail, event.stream))
        elif isinstance(event, Free):
            told.append(order.pop(event.block))
        else:
            told.append(event)
    return told


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_repeated_step_is_a_traced_one(optimizer: str) -> None:
    """Twelve traced steps of the CNN are three traced steps, the last of which is repeated."""
    entry = load_catalogue()["cnn"]
    job = entry.job.replace(optimizer=type(entry.job.loop.optimizer)(optimizer))
    few, many = (record(job.replace(steps=steps), 8, AMPERE) for steps in (3, 12))
    steps, joiner = cut_trace(few), Joiner()
    assert is_periodic(steps)
    joined = [
        event
        for number in range(13)
        for piece in steps[min(number, 3)]
        for event in joiner.join(piece, number).events
    ]
    assert story((*joined, PhaseStart(12, Phase.END))) == story(many.events)
