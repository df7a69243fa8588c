"""The command `planner max-batch`."""

from typing import Annotated, Any

from typer import Argument

from planner.cli.options import (
    CALIBRATIONS,
    DEVICE,
    JOB,
    Answer,
    Method,
    MultipleOf,
    flag,
    option,
    option_flag,
    with_options,
)
from planner.cli.output import print_progress, progress
from planner.errors import UsageError
from planner.program import OnProgress

_SEARCH = {
    "method": Method,
    "multiple_of": MultipleOf,
    "no_retries": Annotated[
        bool | None, flag("--no-retries", "Exit code 0 only for a batch that runs without allocator retries.")
    ],
}


@with_options(JOB, DEVICE, CALIBRATIONS, _SEARCH)
def max_batch_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    gpus: Annotated[int | None, option("N", "With a command: how many emulated GPUs it sees; 1 by default.")],
    stop_after: Annotated[
        int | None,
        option("N", "With a command: end it after N optimizer steps; by default after its first evaluation."),
    ],
    command: Annotated[
        list[str] | None,
        Argument(
            metavar="-- COMMAND...",
            help="A training script in place of --model, run on emulated GPUs; {batch} is its batch size.",
        ),
    ],
) -> Answer:
    """Find the largest batch of a model, or of a training script, that fits a GPU."""
    if command:
        return _max_batch_of_command(command, gpus, stop_after, options)
    if gpus is not None:
        raise UsageError("--gpus is for a command behind --; a model is planned for one GPU")
    if stop_after is not None:
        raise UsageError(
            "--stop-after is for a command behind --; --steps N is how many steps of a model are planned"
        )
    from planner import max_batch

    result = max_batch(on_progress=on_progress, **options)
    return result, bool(result.answer_batch)


def _max_batch_of_command(
    command: list[str], gpus: int | None, stop_after: int | None, options: dict[str, Any]
) -> Answer:
    no_retries = options.pop("no_retries")
    names = ("gpu", "gpu_mib", "alloc_conf", "confidence", "multiple_of")
    emulation = {name: options.pop(name) for name in names}
    ignored = ("cache", "warn", "own_calibrations")
    for name, value in options.items():
        if value is not None and name not in ignored:
            raise UsageError(
                f"{option_flag(name)} has no effect with a command, which is run as it is; remove it"
            )
    from planner.api.run import max_batch_of_command

    with progress(print_progress) as on_progress:
        plan = max_batch_of_command(
            command, gpus=gpus, stop_after=stop_after, on_progress=on_progress, **emulation
        )
    return plan, bool(plan.comfortable_batch if no_retries else plan.max_batch)
