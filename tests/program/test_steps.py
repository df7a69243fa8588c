"""Traces folded into loops: literal events in, the whole loop out; a repeated step is a traced one."""

import pytest

from planner.capture.session import record
from planner.jobs.catalogue import load_catalogue
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Trace
from planner.program.steps import Dealloc, Malloc, Retain, StepSequence, split_steps
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace
from tests.helpers.traces import SITES, alloc

SETUP: tuple[Event, ...] = (
    PhaseStart(0, Phase.SETUP),
    Alloc(0, 30, Category.PARAMETER, 0),
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
)


def test_fold() -> None:
    """Sizes are those of the batch, blocks named by the age of their step; lasting workspaces stand apart."""
    trace = Trace((*SETUP, *STEP_2, PhaseStart(2, Phase.END)), SITES, 2)
    assert split_steps(trace) == StepSequence(
        setup=(Phase.SETUP, Malloc(30, Category.PARAMETER)),
        steps=(
            (
                Phase.INPUTS,
                Malloc(12, Category.INPUT),
                Phase.FORWARD,
                Malloc(7, Category.WORKSPACE),
                Dealloc(0, 1),
                Retain(8),
                Malloc(3, Category.TEMPORARY),
            ),
            (
                Phase.INPUTS,
                Dealloc(1, 0),
                Malloc(12, Category.INPUT),
                Phase.FORWARD,
                Malloc(3, Category.TEMPORARY),
                Dealloc(1, 2),
            ),
        ),
    )


def looping(*sizes: int) -> StepSequence:
    """Return a loop whose steps request one block each."""
    return StepSequence((), tuple((Malloc(size, Category.TEMPORARY),) for size in sizes))


def test_a_settled_loop_repeats_its_last_step() -> None:
    """If the last two steps are the same, every further step is."""
    loop = looping(1, 2, 2)
    assert [loop.step(number) for number in range(6)] == [(), *looping(1, 2, 2, 2, 2).steps]


@pytest.mark.parametrize("loop", [looping(1, 2, 3), looping(1), looping(2, 2, 1)])
def test_an_unsettled_loop_has_no_further_steps(loop: StepSequence) -> None:
    """A loop whose last two steps differ, or that has one step, shows nothing about those that follow."""
    count = len(loop.steps)
    assert loop.step(count) == loop.steps[-1]
    with pytest.raises(
        ValueError, match=f"step {count + 1}: {count} steps are traced, and the last two differ"
    ):
        loop.step(count + 1)


def test_a_trace_of_no_steps_is_its_setup() -> None:
    """A trace without steps folds into a loop without any."""
    assert split_steps(Trace((alloc(0, 5), Free(0)), SITES, 1)) == StepSequence(
        (Malloc(5, Category.TEMPORARY), Dealloc(0, 0)), ()
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_repeated_step_is_a_traced_one(optimizer: str) -> None:
    """Twelve traced steps of the CNN are the steps that three traced ones predict."""
    entry = load_catalogue()["cnn"]
    job = replace(entry.job, optimizer=type(entry.job.optimizer)(optimizer))
    few, many = (split_steps(record(replace(job, steps=steps), 8, AMPERE)) for steps in (3, 12))
    assert many.setup == few.setup
    assert many.steps == tuple(few.step(number) for number in range(1, 13))
