"""The command `planner record`: convert a memory snapshot to an anonymous history."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from planner.cli.options import Answer, option, with_options
from planner.errors import UsageError


@with_options()
def record_command(
    file: Annotated[
        Path | None, Argument(metavar="FILE", help="A pickle of torch.cuda.memory._dump_snapshot.")
    ],
    out: Annotated[Path | None, option("FILE", "Write the history here (.json.gz); else it is only shown.")],
    gpu: Annotated[str | None, option("NAME", "The GPU, which a snapshot does not name.")],
    torch: Annotated[str | None, option("VERSION", "The version of torch, which a snapshot does not name.")],
    kind: Annotated[str | None, option("TEXT", "The job in a few words, such as 'CNN training, batch 32'.")],
) -> Answer:
    """Show the contents of a memory snapshot, and write it without paths and names."""
    from planner.api.record import record_snapshot

    if file is None:
        raise UsageError("FILE is missing: name a pickle of torch.cuda.memory._dump_snapshot")
    return record_snapshot(file, out, gpu=gpu, torch=torch, kind=kind), True
