"""`planner advise`."""

from typing import Any

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Batch, with_options
from planner.cli.output import Output, emit, progress


@with_options(JOB, DEVICE, CALIBRATIONS)
def advise_command(options: dict[str, Any], output: Output, batch: Batch) -> int:
    """Find the smallest changes to the recipe that make a batch fit."""
    from planner import advise

    with progress() as on_progress:
        result = advise(batch=batch, on_progress=on_progress, **options)
    emit(result, output)
    return 0 if result.possible else 1
