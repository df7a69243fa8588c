"""`planner advise`."""

from typing import Any

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Answer, Batch, with_options
from planner.program import OnProgress


@with_options(JOB, DEVICE, CALIBRATIONS)
def advise_command(options: dict[str, Any], on_progress: OnProgress, batch: Batch) -> Answer:
    """Find the smallest changes to the recipe that make a batch fit."""
    from planner import advise

    result = advise(batch=batch, on_progress=on_progress, **options)
    return result, bool(result.possible)
