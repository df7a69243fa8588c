"""`planner estimate`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from planner.cli.options import (
    CalibrationOptions,
    CardOptions,
    JobOptions,
    MethodOptions,
    OutputOptions,
    Text,
    takes,
    whole,
)
from planner.cli.output import answer, answering_first, working
from planner.cli.words import Option


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Which batch size."""

    batch: Annotated[
        Text,
        Option(metavar="N", help="Batch size; by default that of the catalogue or the trace file."),
    ] = None


@takes(BatchOptions, JobOptions, CardOptions, CalibrationOptions, MethodOptions, OutputOptions)
def estimate_command(
    size: BatchOptions,
    job: JobOptions,
    card: CardOptions,
    stored: CalibrationOptions,
    how: MethodOptions,
    output: OutputOptions,
) -> int:
    """Estimate the memory of one batch, and whether it fits."""
    from planner import estimate

    batch = whole("--batch", size.batch, "32")
    options = job.keywords() | card.keywords() | stored.keywords()
    with answering_first(partial(answer, output=output)), working() as tell:
        result = estimate(batch=batch, method=how.method, **options, tell=tell)
    answer(result, output)
    return 1 if result.fits == "no" else 0
