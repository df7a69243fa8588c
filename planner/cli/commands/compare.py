"""`planner compare`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from planner.cli.commands.estimate import BatchOptions
from planner.cli.options import (
    CalibrationOptions,
    CardOptions,
    JobOptions,
    OutputOptions,
    Text,
    takes,
    whole,
)
from planner.cli.output import answer, answering_first, working
from planner.cli.words import Option
from planner.errors import UsageError, unsaved


@dataclass(frozen=True, slots=True)
class PlotOptions:
    """A picture beside the table."""

    plot: Annotated[Text, Option(metavar="FILE", help="Also draw the comparison: a .png, .svg or .pdf.")] = (
        None
    )


@takes(BatchOptions, JobOptions, CardOptions, CalibrationOptions, PlotOptions, OutputOptions)
def compare_command(
    size: BatchOptions,
    job: JobOptions,
    card: CardOptions,
    stored: CalibrationOptions,
    picture: PlotOptions,
    output: OutputOptions,
) -> int:
    """Compare all estimators of one batch with a measured value."""
    batch = whole("--batch", size.batch, "32")
    path = None if picture.plot is None else picture_path(picture.plot)
    from planner.api.compare import compare

    write = partial(answer, output=output)
    with answering_first(write), working() as tell:
        options = job.keywords() | card.keywords() | stored.keywords()
        result = compare(batch=batch, **options, tell=tell)
        if path is not None:
            from planner.report import draw_comparison

            with unsaved(result):
                draw_comparison(result.comparison, path)
    write(result)
    return 0


def picture_path(text: str) -> Path:
    """Where to draw. Refuses what would fail after the work is done."""
    from importlib.util import find_spec

    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {text}: give a file that ends in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'gpu-batch-planner[plot]'")
    return path
