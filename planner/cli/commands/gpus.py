"""The command `planner gpus`."""

from typing import TYPE_CHECKING, Annotated, Any

from planner.cli.options import (
    CALIBRATIONS,
    CLUSTER,
    JOB,
    LIMITS,
    Batch,
    MultipleOf,
    flag,
    option,
    with_options,
)
from planner.cli.output import Output, emit, emit_before_raising, progress
from planner.cli.paths import plot_path
from planner.errors import UsageError, unsaved

if TYPE_CHECKING:
    from planner.api import GpusResult

_SELECTION = {
    "batch": Batch,
    "sort": Annotated[
        str | None,
        option("KEY", "Order: max_batch (the default), memory, name, process, headroom, price or cost."),
    ],
    "filter": Annotated[
        list[str] | None,
        option("WORDS", "Only GPUs that `planner devices WORDS` lists; repeatable: all apply."),
    ],
    "min_mib": Annotated[int | None, option("N", "Only GPUs with a total of at least N MiB.")],
    "max_mib": Annotated[int | None, option("N", "Only GPUs with a total of at most N MiB.")],
    "multiple_of": MultipleOf,
    "prices": Annotated[
        str | None, option("FILE.csv", "Prices of instances, in the schema of SkyPilot's catalogues.")
    ],
    "prices_date": Annotated[
        str | None, option("DAY", "The day of these prices, where neither the file nor its name says it.")
    ],
    "spot": Annotated[bool | None, flag("--spot", "Take the file's spot prices.")],
    "throughput": Annotated[
        list[str] | None,
        option("GPU=N", "Samples a second that you measured on a GPU, or a FILE.csv of them; repeatable."),
    ],
}
_COUNTS = {
    "gpus_per_node": Annotated[int | None, option("N", "With --global-batch: GPUs in a node; 8 by default.")],
    "most_gpus": Annotated[
        int | None, option("N", "With --global-batch: the most GPUs that are tried; 1024 by default.")
    ],
}


@with_options(JOB, LIMITS, CALIBRATIONS, _SELECTION, CLUSTER, _COUNTS)
def gpus_command(
    options: dict[str, Any],
    output: Output,
    csv: Annotated[bool | None, flag("--csv", "Print comma-separated values instead of the table.")],
    form: Annotated[
        str | None,
        option("NAME", "Print the request for a scheduler: slurm, k8s, skypilot or ray.", "--format"),
    ],
    plot: Annotated[
        str | None, option("FILE", "Also draw peak memory against batch size: a .png, .svg or .pdf.")
    ],
) -> int:
    """List every GPU with its largest batch, or the GPUs that run a batch."""
    if csv and output.json:
        raise UsageError("--csv and --json: both say how to answer; give one of them")
    _check_format(form, csv, output)
    path = plot_path(plot)
    question = {name: value for name in (*CLUSTER, *_COUNTS) if (value := options.pop(name)) is not None}
    if question:
        return _answer_cluster({**options, **question}, output, csv, path, form)
    from planner import gpus

    def write(result: "GpusResult") -> None:
        if csv:
            print(result.to_csv(), flush=True)
        elif form is not None:
            print(result.to_scheduler(form), end="", flush=True)
        else:
            emit(result, output)

    if form is not None and options["sort"] is None and options["prices"] is None:
        options["sort"] = "memory"
    with emit_before_raising(write), progress() as on_progress:
        result = gpus(on_progress=on_progress, **options)
        if path is not None:
            on_progress("drawing")
            with unsaved(result):
                result.draw(path)
    write(result)
    return 0 if any(fit.max_batch for fit in result.fits) else 1


def _check_format(form: str | None, csv: bool | None, output: Output) -> None:
    """Raise UsageError if `--format` names no scheduler, or is combined with `--csv` or `--json`."""
    if form is None:
        return
    from planner.report import FORMATS

    if form not in FORMATS:
        raise UsageError(f"--format {form}: give one of {', '.join(FORMATS)}")
    for flag_name, given in (("--csv", csv), ("--json", output.json)):
        if given:
            raise UsageError(f"--format and {flag_name}: both say how to answer; give one of them")


def _answer_cluster(
    options: dict[str, Any], output: Output, csv: bool | None, path: object, form: str | None
) -> int:
    """Print the GPU counts that run a global batch, and return the exit code.

    The exit code is 0 if there is such a count, else 1. Raises UsageError for options that cannot be combined
    with --global-batch.
    """
    if "global_batch" not in options:
        name = next(name for name in (*CLUSTER, *_COUNTS) if name in options)
        raise UsageError(f"--{name.replace('_', '-')}: say for which batch, such as --global-batch 512")
    for flag_name, given in (("--csv", csv), ("--plot", path)):
        if given:
            raise UsageError(f"{flag_name}: not with --global-batch; use --json")
    for name in ("batch", "sort", "multiple_of", "prices", "prices_date", "spot", "throughput"):
        if options.pop(name):
            raise UsageError(f"--{name.replace('_', '-')}: not with --global-batch; remove one")
    from planner import clusters

    with progress() as on_progress:
        result = clusters(on_progress=on_progress, **options)
    if form is None:
        emit(result, output)
    else:
        print(result.to_scheduler(form), end="", flush=True)
    return 0 if result.fits else 1
