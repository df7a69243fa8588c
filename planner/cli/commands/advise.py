"""`planner advise`."""

from planner.cli.commands.estimate import BatchOptions
from planner.cli.options import CalibrationOptions, CardOptions, JobOptions, OutputOptions, takes, whole
from planner.cli.output import answer, working


@takes(BatchOptions, JobOptions, CardOptions, CalibrationOptions, OutputOptions)
def advise_command(
    size: BatchOptions,
    job: JobOptions,
    card: CardOptions,
    stored: CalibrationOptions,
    output: OutputOptions,
) -> int:
    """Find the smallest changes to the recipe that make a batch fit."""
    from planner.api import advise

    options = job.keywords() | card.keywords() | stored.keywords()
    with working() as tell:
        result = advise(batch=whole("--batch", size.batch, "32"), **options, tell=tell)
    answer(result, output)
    return 0 if result.possible else 1
