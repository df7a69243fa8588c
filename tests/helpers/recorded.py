"""Histories of emulated processes, made by hand."""

from planner.emulator.history import Course, CourseMark, History, HistoryEvent, Holder, StepEnd
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
        actions = "a" if move[0] == "+" else "rc"
        made += [HistoryEvent(action, int(address), MIB, 0, int(site or 0)) for action in actions]
    return tuple(made)


def history(moves: tuple[HistoryEvent, ...], course: Course | None, *ends: StepEnd) -> History:
    """Return a history of one process."""
    return History(0, 0, "", 1.0, True, moves, SITES, ends, 7, course)


# Two steps. Block by birth: 0 weights, 1 batch, 2 of layer a, 3 scratch, 4 output, 5 gradient, 6 state,
# 7 next batch, 8 of layer a, 9 gradient.
MOVES = events(
    *("+10", f"+20:{LINE}", "+30", "+40", "-40", "+50"),  # places 0 to 6
    *("+60:2", "-30", "-50", "+70"),  # 6 to 10
    *("-20", f"+21:{LINE}", "-60", "+31", "+61:2"),  # 10 to 15
)
MARKS = (
    CourseMark(2, Phase.FORWARD, "a"),
    CourseMark(5, Phase.FORWARD, ""),
    CourseMark(6, Phase.BACKWARD, ""),
    CourseMark(9, Phase.OPTIMIZER, ""),
    CourseMark(10, Phase.INPUTS, ""),
    CourseMark(13, Phase.FORWARD, "a"),
    CourseMark(14, Phase.BACKWARD, ""),
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
TWO_STEPS = history(MOVES, Course(MARKS, HELD), StepEnd(7, 3, 1))
