"""Fit a program to batch sizes that are multiples of a unit, if the usual fit fails.

A step that splits its batch into four parts fails at batch 2; at some other sizes it has a further part for
the remainder. A step that picks ten samples of a batch fails below ten. In units of as many samples as the
split has parts, the memory of the job is a polynomial.
"""

from collections.abc import Callable

from planner.capture.symbolic.fit_program import fit_program
from planner.capture.symbolic.kernel_calls import RecordedRun
from planner.errors import ModelError
from planner.jobs import Job
from planner.program import FIT_BATCHES, NotAffineError, Program

UNITS = (2, 4, 8, 16, 3, 6, 12, 24, 48)  # samples; people split by powers of two, sometimes by three
_COMMON = 48  # a multiple of all units: a job that refuses multiples of it is assumed to refuse any batch


def fit_in_units(
    run: Callable[[int], RecordedRun], agrees: Callable[[Program, RecordedRun], bool], job: Job
) -> tuple[Program, int]:
    """Return a program fitted to batch sizes that are multiples of a unit, and its smallest batch size.

    The unit is the first of `UNITS` that fits. If 1 or another divisor of the unit fits too, starting at the
    same smallest batch size, the divisor is the program's unit. `run` captures a batch size, and `agrees`
    compares a program with a run. Raises ModelError if the job refuses common multiples of the units too, and
    NotAffineError if no unit fits.
    """
    known: dict[int, RecordedRun | ModelError] = {}

    def taken(batch: int) -> RecordedRun:
        if batch not in known:
            try:
                known[batch] = run(batch)
            except ModelError as error:
                known[batch] = error
        found = known[batch]
        if isinstance(found, ModelError):
            raise found
        return found

    low, high = (taken(_COMMON * batch) for batch in FIT_BATCHES)
    fit_program([low, high], job, _COMMON)

    def fit(least: int, following: int, unit: int) -> Program | None:
        try:
            program = fit_program([taken(least), taken(following)], job, unit)
        except (ModelError, NotAffineError):
            return None
        return program if agrees(program, low) and agrees(program, high) else None

    for unit in UNITS:
        least = FIT_BATCHES[0] * unit
        program = fit(least, FIT_BATCHES[1] * unit, unit)
        if program is not None:
            finer = (part for part in (1, *UNITS) if part < unit and unit % part == 0)
            parts = (fit(least, least + part, part) for part in finer)
            return next((part for part in parts if part is not None), program), least
    raise NotAffineError("sizes are affine in no units of samples")
