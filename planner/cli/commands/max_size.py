"""The command `planner max-size`."""

from typing import Annotated, Any

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Answer, option, with_options
from planner.program import OnProgress


@with_options(JOB, DEVICE, CALIBRATIONS)
def max_size_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    batch: Annotated[
        int | None, option("N", "Batch size; by default that of the catalogue, 2 for plans of nnU-Net.")
    ],
) -> Answer:
    """Find the largest input, or patch of nnU-Net, that fits a GPU at one batch size."""
    from planner import max_size

    result = max_size(batch=batch, on_progress=on_progress, **options)
    return result, result.max_size is not None
