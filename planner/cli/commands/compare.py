"""`planner compare`."""

from functools import partial
from typing import Annotated, Any

from typer import Option

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Batch, with_options
from planner.cli.output import Output, emit, emit_before_raising, progress
from planner.cli.paths import plot_path
from planner.errors import unsaved


@with_options(JOB, DEVICE, CALIBRATIONS)
def compare_command(
    options: dict[str, Any],
    output: Output,
    batch: Batch,
    plot: Annotated[
        str | None, Option(metavar="FILE", help="Also draw the comparison: a .png, .svg or .pdf.")
    ],
) -> int:
    """Compare all estimators of one batch with a measured value."""
    path = plot_path(plot)
    from planner.api.compare import compare

    write = partial(emit, output=output)
    with emit_before_raising(write), progress() as on_progress:
        result = compare(batch=batch, on_progress=on_progress, **options)
        if path is not None:
            from planner.report import draw_comparison

            with unsaved(result):
                draw_comparison(result.comparison, path)
    write(result)
    return 0
