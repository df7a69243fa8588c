"""`planner compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from planner.cli.estimate import BatchOptions
from planner.cli.options import CardOptions, JobOptions, OutputOptions, Text, takes, whole
from planner.cli.output import answer, working
from planner.errors import UsageError


@dataclass(frozen=True, slots=True)
class PlotOptions:
    """A picture beside the table."""

    plot: Annotated[Text, Option(metavar="FILE", help="Draw it as well: a .png, .svg or .pdf.")] = None


@takes(BatchOptions, JobOptions, CardOptions, PlotOptions, OutputOptions)
def compare_command(
    size: BatchOptions, job: JobOptions, card: CardOptions, picture: PlotOptions, output: OutputOptions
) -> int:
    """All estimators of one batch side by side, and the measured value where one is stored."""
    batch = whole("--batch", size.batch, "32")
    path = None if picture.plot is None else _picture(picture.plot)
    from planner import quick_api

    with working() as tell:
        result = quick_api.compare(batch=batch, **job.keywords(), **card.keywords(), tell=tell)
        if path is not None:
            from planner.report.plots import draw_comparison

            draw_comparison(result.comparison, path)
    answer(result, output)
    return 0


def _picture(text: str) -> Path:
    """Where to draw. Refuses what would fail after the work is done."""
    from importlib.util import find_spec

    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {text}: give a file that ends in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'gpu-batch-planner[plot]'")
    return path
