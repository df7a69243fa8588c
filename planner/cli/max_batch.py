"""`planner max-batch`."""

from planner.cli.options import CardOptions, JobOptions, MethodOptions, OutputOptions, takes
from planner.cli.output import answer, working


@takes(JobOptions, CardOptions, MethodOptions, OutputOptions)
def max_batch_command(job: JobOptions, card: CardOptions, how: MethodOptions, output: OutputOptions) -> int:
    """The largest batch of a model that fits a GPU."""
    from planner import api

    with working() as tell:
        result = api.max_batch(method=how.method, **job.keywords(), **card.keywords(), tell=tell)
    answer(result, output)
    return 0 if result.max_batch else 1
