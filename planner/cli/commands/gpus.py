"""`planner gpus`."""

from typing import TYPE_CHECKING, Annotated, Any

from planner.cli.options import CALIBRATIONS, JOB, LIMITS, Batch, MultipleOf, flag, option, with_options
from planner.cli.output import Output, emit, emit_before_raising, progress
from planner.cli.paths import plot_path
from planner.errors import UsageError, unsaved

if TYPE_CHECKING:
    from planner.api import GpusResult

_SELECTION = {
    "batch": Batch,
    "sort": Annotated[
        str | None, option("KEY", "Order: max_batch (the default), memory, name, process or headroom.")
    ],
    "filter": Annotated[
        list[str] | None,
        option("WORDS", "Only GPUs that `planner devices WORDS` lists; repeatable: all apply."),
    ],
    "min_mib": Annotated[int | None, option("N", "Only GPUs with a total of at least N MiB.")],
    "max_mib": Annotated[int | None, option("N", "Only GPUs with a total of at most N MiB.")],
    "multiple_of": MultipleOf,
}


@with_options(JOB, LIMITS, CALIBRATIONS, _SELECTION)
def gpus_command(
    options: dict[str, Any],
    output: Output,
    csv: Annotated[bool | None, flag("--csv", "Print comma-separated values instead of the table.")],
    plot: Annotated[
        str | None, option("FILE", "Also draw peak memory against batch size: a .png, .svg or .pdf.")
    ],
) -> int:
    """List every GPU with its largest batch, or those that run a batch."""
    if csv and output.json:
        raise UsageError("--csv and --json: both say how to answer; give one of them")
    path = plot_path(plot)
    from planner import gpus

    def write(result: "GpusResult") -> None:
        if csv:
            print(result.to_csv(), flush=True)
        else:
            emit(result, output)

    with emit_before_raising(write), progress() as on_progress:
        result = gpus(on_progress=on_progress, **options)
        if path is not None:
            on_progress("drawing")
            with unsaved(result):
                result.draw(path)
    write(result)
    return 0 if any(fit.max_batch for fit in result.fits) else 1
