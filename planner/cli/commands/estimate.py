"""The command `planner estimate`."""

from typing import Any

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Answer, Batch, Method, with_options
from planner.program import OnProgress


@with_options(JOB, DEVICE, CALIBRATIONS, {"batch": Batch, "method": Method})
def estimate_command(options: dict[str, Any], on_progress: OnProgress) -> Answer:
    """Estimate the memory of one batch, and whether it fits."""
    from planner import estimate

    result = estimate(on_progress=on_progress, **options)
    return result, result.fits != "no"
