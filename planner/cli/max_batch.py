"""`planner max-batch`."""

from planner.cli.options import (
    CalibrationOptions,
    CardOptions,
    JobOptions,
    MethodOptions,
    OutputOptions,
    takes,
)
from planner.cli.output import answer, answering_first, working


@takes(JobOptions, CardOptions, CalibrationOptions, MethodOptions, OutputOptions)
def max_batch_command(
    job: JobOptions,
    card: CardOptions,
    stored: CalibrationOptions,
    how: MethodOptions,
    output: OutputOptions,
) -> int:
    """The largest batch of a model that fits a GPU."""
    from planner import api

    options = job.keywords() | card.keywords() | stored.keywords()
    with answering_first(output), working() as tell:
        result = api.max_batch(method=how.method, **options, tell=tell)
    answer(result, output)
    return 0 if result.max_batch else 1
