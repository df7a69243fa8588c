"""Records of `planner run`, written out step by step, and the causes they decide."""

import pytest

from planner.planning.diagnosis import Cause, Diagnosis, diagnose_run


def diagnosis_of(*peaks_mib: tuple[int, int, int], **failure: object) -> Diagnosis:
    """Return the diagnosis of a run whose rows have a first step, a last step and a peak."""
    rows = [{"first": first, "last": last, "peak_allocated_mib": peak} for first, last, peak in peaks_mib]
    failed = {"step": 1 + (peaks_mib[-1][1] if peaks_mib else 0), "line": "a.py:9", "requested_mib": 20.0}
    peak = max((peak for _, _, peak in peaks_mib), default=900)
    return diagnose_run(
        {
            "gpu": "T4",
            "steps": rows,
            "failure": failed | failure,
            "peak_allocated_mib": peak,
            "peak_reserved_mib": peak + 100,
        }
    )


@pytest.mark.parametrize(
    ("peaks", "cause"),
    [
        ([(1, 1, 200), *((at, at, 200 + 10 * at) for at in range(2, 9))], Cause.GROWTH),
        # each second step keeps its output
        ([(1, 1, 200), *((at, at + 1, 200 + 10 * at) for at in range(2, 20, 2))], Cause.GROWTH),
        # DistributedDataParallel rebuilds its buckets in the second step
        (
            [(1, 1, 200), (2, 2, 290), (3, 3, 300), *((at, at, 240 + 10 * at) for at in range(4, 20))],
            Cause.GROWTH,
        ),
        # batches of other sizes
        ([(1, 1, 200), (2, 2, 290), (3, 3, 250), (4, 4, 300), (5, 5, 240), (6, 6, 310)], Cause.FRAGMENTATION),
        # the first steps are larger than each other, then all are alike
        ([(1, 1, 200), (2, 2, 290), (3, 3, 300), (4, 90, 320)], Cause.FRAGMENTATION),
        ([(1, 1, 200), (2, 90, 320)], Cause.FRAGMENTATION),
        ([(1, 1, 200), (2, 2, 205), (3, 3, 207), (4, 4, 210)], Cause.FRAGMENTATION),  # less than asked for
    ],
)
def test_growth_is_a_peak_that_rises_with_the_steps(peaks: list[tuple[int, int, int]], cause: Cause) -> None:
    """Peaks of one row are equal; a peak that lasts for most of the steps is no growth."""
    assert diagnosis_of(*peaks).cause is cause


@pytest.mark.parametrize(
    ("step", "phase", "cause"),
    [
        (1, "optimizer", Cause.FIRST_STEP),
        (1, "backward", Cause.FRAGMENTATION),
        (1, "evaluation", Cause.EVALUATION),
        (2, "optimizer", Cause.FRAGMENTATION),
    ],
)
def test_the_phase_decides(step: int, phase: str, cause: Cause) -> None:
    """The state of an optimizer is allocated in its first step."""
    assert diagnosis_of(step=step, phase=phase).cause is cause


def test_a_module_named_after_an_evaluation_is_none() -> None:
    """A module's name says nothing of the phase; a module named by a number reads as a module."""
    found = diagnosis_of(phase="", module="valid.0")
    assert (found.cause, found.site.line) == (Cause.FRAGMENTATION, "a.py:9, module valid.0")
