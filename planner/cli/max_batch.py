"""`planner max-batch`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from planner.cli.declared import MultipleOf
from planner.cli.options import (
    CalibrationOptions,
    CardOptions,
    JobOptions,
    MethodOptions,
    OutputOptions,
    takes,
    whole,
)
from planner.cli.output import answer, answering_first, working
from planner.cli.words import Option


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Which batch sizes may be the answer."""

    multiple_of: MultipleOf = None
    no_retries: Annotated[
        bool,
        Option("--no-retries", help="Exit code 0 only for a batch that runs without allocator retries."),
    ] = False


@takes(JobOptions, CardOptions, AnswerOptions, CalibrationOptions, MethodOptions, OutputOptions)
def max_batch_command(
    job: JobOptions,
    card: CardOptions,
    chosen: AnswerOptions,
    stored: CalibrationOptions,
    how: MethodOptions,
    output: OutputOptions,
) -> int:
    """Find the largest batch of a model that fits a GPU."""
    from planner import api

    options = job.keywords() | card.keywords() | stored.keywords()
    multiple_of = whole("--multiple-of", chosen.multiple_of, "8")
    with answering_first(partial(answer, output=output)), working() as tell:
        result = api.max_batch(
            method=how.method,
            multiple_of=multiple_of,
            no_retries=chosen.no_retries,
            **options,
            tell=tell,
        )
    answer(result, output)
    return 0 if result.answer_batch else 1
