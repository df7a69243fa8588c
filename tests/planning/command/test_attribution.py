"""Phases, modules and categories of recorded histories, on histories made by hand."""

import pytest

from planner.allocator.config import UNLIMITED
from planner.allocator.history.history import HistoryEvent
from planner.emulator.history import ProcessHistory, StepEnd
from planner.hardware.device import MIB
from planner.planning.attribution import explain
from planner.planning.command.attribution import attributed_trace
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site
from tests.helpers.recorded import HELD, KEPT, MARKS, MOVES, TWO_STEPS, history, script_log_of
from tests.helpers.structs import replace


def roles(one: ProcessHistory, blas_bytes: int = KEPT) -> list[Category]:
    """Return the categories of all blocks by birth."""
    return [
        event.category for event in attributed_trace(one, 1, blas_bytes).events if isinstance(event, Alloc)
    ]


def test_categories() -> None:
    """Held blocks follow from addresses; blocks alive when the backward pass starts are activations."""
    first = [Category.PARAMETER, Category.INPUT, Category.ACTIVATION, Category.WORKSPACE, Category.ACTIVATION]
    later = [Category.GRADIENT, Category.OPTIMIZER, Category.INPUT, Category.ACTIVATION, Category.GRADIENT]
    assert roles(TWO_STEPS) == [*first, *later]


def test_modules_and_operators() -> None:
    """A block belongs to the module that ran at its birth; what is held belongs to the holder's module."""
    trace = attributed_trace(TWO_STEPS, 1, KEPT)
    sites = [trace.sites[event.site] for event in trace.events if isinstance(event, Alloc)]
    assert sites[:6] == [
        Site("a", "linear"),
        Site("", "train"),
        Site("a", "linear"),
        Site("a", "linear"),
        Site("", "linear"),
        Site("a", "autograd"),
    ]
    assert [detail.source for detail in trace.provenance[:2]] == ["train.py:9", "train.py:7"]


def test_phases() -> None:
    """Each phase begins where the script began it; steps end with the optimizer's."""
    trace = attributed_trace(TWO_STEPS, 1, KEPT)
    assert [(mark.step, mark.phase) for mark in trace.events if isinstance(mark, PhaseStart)] == [
        (0, Phase.SETUP),
        (1, Phase.FORWARD),
        (1, Phase.BACKWARD),
        (1, Phase.OPTIMIZER),
        (2, Phase.INPUTS),
        (2, Phase.FORWARD),
        (2, Phase.BACKWARD),
    ]


def test_what_only_gives_back_after_the_last_step_is_the_end() -> None:
    """A step begins with a request, not with frees alone."""
    ended = history(MOVES[:14], script_log_of(MARKS[:5], HELD[:2]), StepEnd(7, 3, 1))
    marks = [event for event in attributed_trace(ended, 1, KEPT).events if isinstance(event, PhaseStart)]
    assert marks[-2:] == [PhaseStart(1, Phase.OPTIMIZER), PhaseStart(1, Phase.END)]


def test_categories_add_up_to_the_peak() -> None:
    """No byte is without a category."""
    explanation = explain(attributed_trace(TWO_STEPS, 1, KEPT), UNLIMITED)
    assert sum(explanation.at_peak.values()) == explanation.run.peak_allocated_bytes == 5 * MIB
    assert explanation.modules.size_bytes == 5 * MIB


def test_what_cublas_keeps_is_a_workspace() -> None:
    """A workspace is born in the forward pass like an activation, has a known size and outlives the step."""
    history = replace(
        TWO_STEPS, events=(*MOVES[:2], HistoryEvent("alloc", 30, KEPT, 0), *MOVES[3:8], *MOVES[10:])
    )
    history = replace(history, script_log=script_log_of(MARKS[:3], HELD[:1]), step_ends=(StepEnd(6, 1, 1),))
    assert roles(history)[2] is Category.WORKSPACE
    assert roles(history, blas_bytes=KEPT + 1)[2] is Category.ACTIVATION


def test_a_run_that_ends_in_the_forward_pass_has_activations() -> None:
    """Blocks that a backward pass would have used count as activations even if memory ends before it."""
    script_log = script_log_of(MARKS[:2], HELD[:1])
    ended = history((*MOVES[:7], HistoryEvent("oom", 0, MIB, 0)), script_log)
    trace = attributed_trace(ended, 1, KEPT)
    assert roles(ended)[:5] == [
        *(
            Category.PARAMETER,
            Category.TEMPORARY,
            Category.ACTIVATION,
            Category.WORKSPACE,
            Category.ACTIVATION,
        )
    ]
    assert sum(isinstance(event, Free) for event in trace.events) == 1


def test_without_a_course_nothing_is_attributed() -> None:
    """Histories of the search for the largest batch have none."""
    with pytest.raises(ValueError, match="records no phases"):
        attributed_trace(replace(TWO_STEPS, script_log=None), 1, KEPT)
