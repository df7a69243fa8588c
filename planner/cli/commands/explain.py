"""The command `planner explain`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from planner.allocator.history import Recording
from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Answer, Batch, option, with_options
from planner.cli.paths import page_path, plot_path
from planner.errors import unsaved
from planner.jobs import Job
from planner.program import OnProgress


@with_options(JOB, DEVICE, CALIBRATIONS)
def explain_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    batch: Batch,
    top: Annotated[int | None, option("N", "Number of tensors and differences shown; 10 by default.")],
    depth: Annotated[int | None, option("N", "Levels of modules shown; by default as many as are readable.")],
    plot: Annotated[str | None, option("FILE", "Also draw memory over time: a .png, .svg or .pdf.")],
    html: Annotated[
        str | None, option("FILE", "Also write a page (.html) with the memory for any batch and GPU.")
    ],
    snapshot: Annotated[Path | None, option("FILE", "Also write a pickle for torch's memory_viz.")],
    against: Annotated[
        Path | None,
        option(
            "HISTORY",
            "Compare with what a GPU's allocator recorded: a history of planner verify or calibrate, "
            "a pickle of torch.cuda.memory._snapshot(), or a folder of measuring records.",
        ),
    ],
) -> Answer:
    """Show the peak memory of a batch by category, module and tensor."""
    picture, page = plot_path(plot), page_path(html)
    from planner import explain
    from planner.api import VaryingExplainResult, batch_curve

    read = None if against is None else partial(_load_recording, against)
    options["on_progress"] = on_progress
    result = explain(batch=batch, against=read, top=top, depth=depth, **options)
    with unsaved(result):
        if picture is not None:
            on_progress("drawing")
            result.draw(picture)
        if page is not None:
            curve = None
            if not isinstance(result, VaryingExplainResult):
                curve = batch_curve(batch=result.explanation.run.batch, **options)
            on_progress("writing the page")
            result.save_page(page, curve)
        if snapshot is not None:
            result.save_snapshot(snapshot)
    return result, True


def _load_recording(path: Path, job: Job, batch: int) -> Recording:
    """Load a GPU's recording of a job at one batch size. `path` is a file, or a folder of recordings."""
    from calibration.records.load import load_recording

    return load_recording(path, job, batch)
