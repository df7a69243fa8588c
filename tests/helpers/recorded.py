"""Histories of emulated processes, made by hand."""

from planner.allocator.history.history import HistoryEvent
from planner.emulator.history import Holder, ProcessHistory, ScriptLog, ScriptMark, StepEnd
from planner.hardware.device import MIB
from planner.program.events import Category, Phase, Site

LINE = 1  # index of the site of the line that copies the batch
SITES = (Site("train.py:9", "linear"), Site("train.py:7", "train"), Site("", ""))
KEPT = 8 * MIB


def events(*moves: str) -> tuple[HistoryEvent, ...]:
    """Return births of 1 MiB as `+ADDRESS` or `+ADDRESS:SITE`, and deaths as `-ADDRESS`."""
    made = []
    for move in moves:
        address, _, site = move[1:].partition(":")
        actions = ("alloc",) if move[0] == "+" else ("free_requested", "free_completed")
        made += [HistoryEvent(action, int(address), MIB, int(site or 0)) for action in actions]
    return tuple(made)


def history(moves: tuple[HistoryEvent, ...], script_log: ScriptLog | None, *ends: StepEnd) -> ProcessHistory:
    """Return a history of one process."""
    return ProcessHistory(0, 7, 0, "", 1.0, True, moves, SITES, ends, script_log)


def script_log_of(
    marks: tuple[ScriptMark, ...], held: tuple[tuple[int, tuple[Holder, ...]], ...]
) -> ScriptLog:
    """Return a script log in which each place has a table of its own."""
    places = tuple((place, index) for index, (place, _) in enumerate(held))
    return ScriptLog(marks, places, tuple(table for _, table in held))


# Two steps. Block by birth: 0 weights, 1 batch, 2 of layer a, 3 scratch, 4 output, 5 gradient, 6 state,
# 7 next batch, 8 of layer a, 9 gradient.
MOVES = events(
    *("+10", f"+20:{LINE}", "+30", "+40", "-40", "+50"),  # places 0 to 6
    *("+60:2", "-30", "-50", "+70"),  # 6 to 10
    *("-20", f"+21:{LINE}", "-60", "+31", "+61:2"),  # 10 to 15
)
MARKS = (
    ScriptMark(2, Phase.FORWARD, "a"),
    ScriptMark(5, Phase.FORWARD, ""),
    ScriptMark(6, Phase.BACKWARD, ""),
    ScriptMark(9, Phase.OPTIMIZER, ""),
    ScriptMark(10, Phase.INPUTS, ""),
    ScriptMark(13, Phase.FORWARD, "a"),
    ScriptMark(14, Phase.BACKWARD, ""),
)
HELD = (
    (2, (Holder(10, Category.PARAMETER, "a"),)),
    (
        10,
        (
            Holder(10, Category.PARAMETER, "a"),
            Holder(60, Category.GRADIENT, "a"),
            Holder(70, Category.OPTIMIZER, "a"),
        ),
    ),
    (15, (Holder(61, Category.GRADIENT, "a"), Holder(99, Category.GRADIENT, "b"))),
)
TWO_STEPS = history(MOVES, script_log_of(MARKS, HELD), StepEnd(7, 3, 1))
