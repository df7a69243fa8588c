"""`planner estimate`."""

from functools import partial
from typing import Any

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Batch, Method, with_options
from planner.cli.output import Output, emit, emit_before_raising, progress


@with_options(JOB, DEVICE, CALIBRATIONS)
def estimate_command(options: dict[str, Any], output: Output, batch: Batch, method: Method) -> int:
    """Estimate the memory of one batch, and whether it fits."""
    from planner import estimate

    with emit_before_raising(partial(emit, output=output)), progress() as on_progress:
        result = estimate(batch=batch, method=method, on_progress=on_progress, **options)
    emit(result, output)
    return 1 if result.fits == "no" else 0
