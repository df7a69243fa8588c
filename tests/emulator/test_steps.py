"""Peaks of the evaluations between optimizer steps, by the modules that run without gradients."""

import pytest

from planner.emulator.child.steps import Evaluations


class Readings:
    """Peaks of GPU 0, read one after the other."""

    def __init__(self) -> None:
        self.next_bytes = 0

    def __call__(self) -> dict[int, dict[str, int]]:
        return {0: {"allocated_bytes": self.next_bytes}}


@pytest.fixture
def readings() -> Readings:
    return Readings()


def peaks(size_bytes: int) -> dict[int, dict[str, int]]:
    return {0: {"allocated_bytes": size_bytes}}


def test_an_evaluation_has_peaks_of_its_own_that_the_next_step_includes(readings: Readings) -> None:
    """30 bytes are read before the evaluation, 90 at its end and 40 at the end of step 3."""
    evaluations = Evaluations(readings)
    evaluations.end_step(1)
    evaluations.end_step(2)
    for has_gradients, size_bytes in ((False, 30), (False, 80), (True, 90), (True, 20)):
        readings.next_bytes = size_bytes
        evaluations.note_module(has_gradients)
    readings.next_bytes = 40
    assert evaluations.end_step(3) == peaks(90)
    assert (evaluations.peaks, evaluations.before_step) == (peaks(90), 3)
    assert evaluations.end_step(4) == peaks(40)


def test_an_evaluation_may_be_the_last_thing(readings: Readings) -> None:
    """50 bytes are read when it begins, 20 when the script is over."""
    evaluations = Evaluations(readings)
    evaluations.end_step(1)
    readings.next_bytes = 50
    evaluations.note_module(False)
    readings.next_bytes = 20
    assert evaluations.end() == peaks(50)
    assert evaluations.peaks == peaks(20)


def test_what_runs_before_the_first_step_is_no_evaluation(readings: Readings) -> None:
    """A model that is tried out once, before it is trained."""
    evaluations = Evaluations(readings)
    evaluations.note_module(False)
    for step in (1, 2):
        evaluations.note_module(True)
        evaluations.end_step(step)
    assert (evaluations.peaks, evaluations.before_step) == ({}, None)


@pytest.mark.parametrize("usual", [0, 3])
def test_an_evaluation_is_more_without_gradients_than_usual(usual: int, readings: Readings) -> None:
    """A teacher that runs in every step is none; the step after the first evaluation is known."""
    evaluations = Evaluations(readings)
    for step, count in enumerate([5, usual, usual, usual + 1, usual], 1):
        for has_gradients in [False] * count + [True]:
            evaluations.note_module(has_gradients)
        evaluations.end_step(step)
        assert evaluations.before_step == (None if step < 4 else 4)
        assert bool(evaluations.peaks) == (step >= 4)
