"""Peaks of loading, of evaluations and between steps, by the modules that run, with gradients or without."""

import pytest

from planner.emulator.child.steps import Phases


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
    phases = Phases(readings)
    phases.end_step(1)
    phases.end_step(2)
    for has_gradients, size_bytes in ((False, 30), (False, 80), (True, 90), (True, 20)):
        readings.next_bytes = size_bytes
        phases.note_module(has_gradients)
    readings.next_bytes = 40
    assert phases.end_step(3) == peaks(90)
    assert (phases.evaluations, phases.before_step) == (peaks(90), 3)
    assert phases.end_step(4) == peaks(40)


def test_an_evaluation_may_be_the_last_thing(readings: Readings) -> None:
    """50 bytes are read when it begins, 20 when the script is over."""
    phases = Phases(readings)
    phases.end_step(1)
    readings.next_bytes = 50
    phases.note_module(False)
    readings.next_bytes = 20
    assert phases.end() == peaks(50)
    assert phases.evaluations == peaks(20)


def test_what_runs_before_the_first_step_is_no_evaluation(readings: Readings) -> None:
    """A model that is tried out once, before it is trained."""
    phases = Phases(readings)
    phases.note_module(False)
    for step in (1, 2):
        phases.note_module(True)
        phases.end_step(step)
    assert (phases.evaluations, phases.before_step) == ({}, None)


@pytest.mark.parametrize("usual", [0, 3])
def test_an_evaluation_is_more_without_gradients_than_usual(usual: int, readings: Readings) -> None:
    """A teacher that runs in every step is none; the step after the first evaluation is known."""
    phases = Phases(readings)
    for step, count in enumerate([5, usual, usual, usual + 1, usual], 1):
        for has_gradients in [False] * count + [True]:
            phases.note_module(has_gradients)
        phases.end_step(step)
        assert phases.before_step == (None if step < 4 else 4)
        assert bool(phases.evaluations) == (step >= 4)


def test_loading_ends_with_the_first_module_and_a_pause_with_the_next(readings: Readings) -> None:
    """70 bytes are loaded, 25 are the most between two steps, and each step includes what came before it."""
    phases = Phases(readings)
    for step, (before, within) in enumerate([(70, 40), (20, 50), (25, 60)], 1):
        readings.next_bytes = before
        phases.note_module(True)
        readings.next_bytes = within
        phases.note_module(True)
        assert phases.end_step(step) == peaks(max(before, within))
    assert (phases.loading, phases.between_steps) == (peaks(70), peaks(25))


def test_a_module_on_the_cpu_does_not_end_loading() -> None:
    """It runs before the process has memory on a GPU, which a reading of nothing shows."""
    readings = iter([{}, peaks(30), peaks(90)])
    phases = Phases(lambda: next(readings))
    for _ in range(2):
        phases.note_module(True)
    phases.end_step(1)
    assert phases.loading == peaks(30)


def test_steps_without_modules_have_no_phases(readings: Readings) -> None:
    """A loss of plain functions: no one knows where its steps begin."""
    readings.next_bytes = 10
    phases = Phases(readings)
    for step in (1, 2):
        phases.end_step(step)
    assert (phases.loading, phases.between_steps, phases.current(False)) == ({}, {}, "")


def test_the_phase_that_runs_is_known(readings: Readings) -> None:
    """Before any module, within a step, after a step, and in an evaluation, which no step before had."""
    readings.next_bytes = 10
    phases = Phases(readings)
    known = [phases.current(False)]
    for step in (1, 2):
        phases.note_module(True)
        known.append(phases.current(False))
        phases.end_step(step)
        known.append(phases.current(False))
    phases.note_module(False)
    known.append(phases.current(False))
    assert known == ["loading", "", "between steps", "", "between steps", "evaluation"]


def test_a_module_without_hooks_is_no_phase(readings: Readings) -> None:
    """A module that is compiled in place runs no hooks: neither loading nor a pause is told while it runs."""
    readings.next_bytes = 10
    phases = Phases(readings)
    assert phases.current(True) == ""
    phases.note_module(True)
    phases.end_step(1)
    assert phases.current(True) == ""


def test_modules_without_gradients_in_the_second_step_may_be_a_teacher(readings: Readings) -> None:
    """What is usual between two steps is not known before the second step ends."""
    readings.next_bytes = 10
    phases = Phases(readings)
    phases.note_module(True)
    phases.end_step(1)
    phases.note_module(False)
    assert phases.current(False) == ""
