"""`planner explain`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from planner.allocator.history import Recording
from planner.cli.commands.compare import picture_path
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
from planner.jobs import Job


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """How much is told, and where else."""

    top: Annotated[
        Text, Option(metavar="N", help="Number of tensors and differences shown; 10 by default.")
    ] = None
    depth: Annotated[
        Text, Option(metavar="N", help="Levels of modules shown; by default as many as are readable.")
    ] = None
    plot: Annotated[
        Text, Option(metavar="FILE", help="Also draw memory over time: a .png, .svg or .pdf.")
    ] = None
    html: Annotated[
        Text, Option(metavar="FILE", help="Also write a page (.html) with the memory for any batch and GPU.")
    ] = None
    snapshot: Annotated[Text, Option(metavar="FILE", help="Also write a pickle for torch's memory_viz.")] = (
        None
    )
    against: Annotated[
        Text,
        Option(
            metavar="HISTORY",
            help="Compare with what a GPU's allocator recorded: a history of planner verify or calibrate, "
            "a pickle of torch.cuda.memory._snapshot(), or a folder of measuring records.",
        ),
    ] = None


@takes(BatchOptions, JobOptions, CardOptions, CalibrationOptions, ExplainOptions, OutputOptions)
def explain_command(
    size: BatchOptions,
    job: JobOptions,
    card: CardOptions,
    stored: CalibrationOptions,
    how: ExplainOptions,
    output: OutputOptions,
) -> int:
    """Show the peak memory of a batch by category, module and tensor."""
    from planner import explain

    batch = whole("--batch", size.batch, "32")
    top, depth = whole("--top", how.top, "10"), whole("--depth", how.depth, "2")
    picture = None if how.plot is None else picture_path(how.plot)
    page = None if how.html is None else page_path(how.html)
    against = None if how.against is None else _Recorded(Path(how.against))
    options = job.keywords() | card.keywords() | stored.keywords()
    write = partial(answer, output=output)
    with answering_first(write), working() as tell:
        result = explain(batch=batch, against=against, top=top, depth=depth, **options, tell=tell)
        with unsaved(result):
            if picture is not None:
                tell("drawing")
                result.draw(picture)
            if page is not None:
                from planner.api import batch_curve

                curve = batch_curve(batch=result.explanation.run.batch, **options, tell=tell)
                tell("writing the page")
                result.save_page(page, curve)
            if how.snapshot is not None:
                result.save_snapshot(Path(how.snapshot))
    write(result)
    return 0


def page_path(text: str) -> Path:
    """Where to write the page. Refuses what would fail after the work is done."""
    from importlib.util import find_spec

    path = Path(text)
    if path.suffix not in (".html", ".htm"):
        raise UsageError(f"--html {text}: give a file that ends in .html")
    if find_spec("plotly") is None:
        raise UsageError("--html needs plotly: pip install 'gpu-batch-planner[page]'")
    return path


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Reads what a GPU recorded, once the job is known: a folder may hold many records."""

    path: Path

    def __call__(self, job: Job, batch: int) -> Recording:
        from calibration.records.load import load_recording

        return load_recording(self.path, job, batch)
