"""The command `planner compare`."""

from typing import Annotated, Any

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Answer, Batch, option, with_options
from planner.cli.paths import plot_path
from planner.errors import unsaved
from planner.program import OnProgress


@with_options(JOB, DEVICE, CALIBRATIONS)
def compare_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    batch: Batch,
    plot: Annotated[str | None, option("FILE", "Also draw the comparison: a .png, .svg or .pdf.")],
) -> Answer:
    """Compare the estimates of one batch by every method, with a measured value if one is stored."""
    path = plot_path(plot)
    from planner.api.compare import compare

    result = compare(batch=batch, on_progress=on_progress, **options)
    if path is not None:
        from planner.report import draw_comparison

        with unsaved(result):
            draw_comparison(result.comparison, path)
    return result, True
