"""The command `planner diagnose`: tell why a process ran out of GPU memory."""

from typing import Annotated

from typer import Argument

from planner.cli.options import Answer, with_options
from planner.errors import UsageError


@with_options()
def diagnose_command(
    file: Annotated[
        str | None,
        Argument(
            metavar="FILE",
            help="A log with an out-of-memory message (-: standard input), a pickle of "
            "torch.cuda.memory._dump_snapshot, a history (.json.gz) or the JSON of planner run.",
        ),
    ],
) -> Answer:
    """Tell why a process ran out of GPU memory, and which settings would have helped."""
    from planner.api.diagnose import diagnose

    if file is None:
        raise UsageError(
            "FILE is missing: name a log, a memory snapshot or a history, or - for standard input"
        )
    return diagnose(file), True
