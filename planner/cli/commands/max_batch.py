"""`planner max-batch`."""

from functools import partial
from typing import Annotated, Any

from typer import Argument, Option

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Method, MultipleOf, option_flag, with_options
from planner.cli.output import Output, emit, emit_before_raising, print_progress, progress
from planner.errors import UsageError


@with_options(JOB, DEVICE, CALIBRATIONS)
def max_batch_command(
    options: dict[str, Any],
    output: Output,
    method: Method,
    multiple_of: MultipleOf,
    no_retries: Annotated[
        bool | None,
        Option("--no-retries", help="Exit code 0 only for a batch that runs without allocator retries."),
    ],
    gpus: Annotated[
        int | None, Option(metavar="N", help="With a command: how many emulated GPUs it sees; 1 by default.")
    ],
    command: Annotated[
        list[str] | None,
        Argument(
            metavar="-- COMMAND...",
            help="A training script in place of --model, run on emulated GPUs; {batch} is its batch size.",
        ),
    ],
) -> int:
    """Find the largest batch of a model that fits a GPU."""
    if command:
        emulation = {name: options.pop(name) for name in ("gpu", "gpu_mib", "alloc_conf", "confidence")}
        _reject_beside_command(options | {"method": method})
        from planner.api.run import max_batch_of_command

        with progress(print_progress) as on_progress:
            plan = max_batch_of_command(
                command, gpus=gpus, multiple_of=multiple_of, on_progress=on_progress, **emulation
            )
        emit(plan, output)
        return 0 if (plan.comfortable_batch if no_retries else plan.max_batch) else 1
    if gpus is not None:
        raise UsageError("--gpus is for a command behind --; a model is planned for one GPU")
    from planner import max_batch

    with emit_before_raising(partial(emit, output=output)), progress() as on_progress:
        result = max_batch(
            method=method,
            multiple_of=multiple_of,
            no_retries=no_retries,
            on_progress=on_progress,
            **options,
        )
    emit(result, output)
    return 0 if result.answer_batch else 1


def _reject_beside_command(options: dict[str, Any]) -> None:
    """Raise UsageError for the first option that means nothing beside a command."""
    ignored = ("cache", "warn", "own_calibrations")
    for name, value in options.items():
        if value is not None and name not in ignored:
            raise UsageError(
                f"{option_flag(name)} means nothing beside a command, which is run as it is; leave it away"
            )
