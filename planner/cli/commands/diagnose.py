"""The command `planner diagnose`: tell why a process ran out of GPU memory."""

from typing import Annotated, Any

from typer import Argument

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Answer, Batch, with_options
from planner.errors import UsageError
from planner.program import OnProgress

_OF_THE_CALLER = ("cache", "warn", "own_calibrations")  # keywords that no option of the command line sets


@with_options(JOB, DEVICE, CALIBRATIONS)
def diagnose_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    batch: Batch,
    file: Annotated[
        str | None,
        Argument(
            metavar="FILE",
            help="A log with an out-of-memory message (-: standard input), a pickle of "
            "torch.cuda.memory._dump_snapshot, a trace of torch.profiler, a history (.json.gz) or the JSON "
            "of planner run.",
        ),
    ],
) -> Answer:
    """Tell why a process ran out of GPU memory; with a job, also the smallest changes that make it fit."""
    from planner.api.diagnose import diagnose

    if file is None:
        raise UsageError(
            "FILE is missing: name a log, a memory snapshot, a trace or a history, or - for standard input"
        )
    given = {name for name, value in options.items() if value is not None and name not in _OF_THE_CALLER}
    if options["model"] is None and (batch is not None or given):
        raise UsageError("--model is missing: the options of a job and of a GPU are those of planner advise")
    return diagnose(file, batch=batch, on_progress=on_progress, **options), True
