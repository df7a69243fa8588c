"""`planner run`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from planner.cli.bottom_line import live_progress
from planner.cli.options import AllocConf, GpuMib, with_options
from planner.cli.output import Output, emit, emit_before_raising
from planner.cli.paths import page_path, plot_path
from planner.errors import unsaved

if TYPE_CHECKING:
    from planner.api.run import RunResult


@with_options()
def run_command(
    output: Output,
    gpu: Annotated[
        str | None, Option(metavar="NAME", help="A GPU of the database: planner devices lists them.")
    ],
    gpu_mib: GpuMib,
    gpus: Annotated[int | None, Option(metavar="N", help="How many of them the command sees; 1 by default.")],
    stop_after: Annotated[
        int | None, Option(metavar="N", help="End the command after this many optimizer steps.")
    ],
    snapshot: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Write the allocator's history, for torch's memory_viz and planner explain --against.",
        ),
    ],
    plot: Annotated[
        str | None,
        Option(metavar="FILE", help="Explain the peak, and draw memory over time: a .png, .svg or .pdf."),
    ],
    html: Annotated[
        str | None, Option(metavar="FILE", help="Explain the peak, and write a page (.html) with the memory.")
    ],
    alloc_conf: AllocConf,
    copy_bytes: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Copies to the GPU of up to this size read back as they were: 65536 by default.",
        ),
    ],
    command: Annotated[
        list[str] | None,
        Argument(metavar="-- COMMAND...", help="The command, as on a machine with such GPUs."),
    ],
) -> int:
    """Run a command, unmodified, with the CUDA build of PyTorch on emulated GPUs."""
    picture, page = plot_path(plot), page_path(html)
    from planner.api.run import run

    def write(result: "RunResult") -> None:
        emit(result, output)

    with emit_before_raising(write):
        with live_progress() as (on_progress, seconds):
            result = run(
                command or [],
                gpu=gpu,
                gpu_mib=gpu_mib,
                gpus=gpus,
                stop_after=stop_after,
                copy_bytes=copy_bytes,
                alloc_conf=alloc_conf,
                snapshot=None if snapshot is None else Path(snapshot),
                explain=picture is not None or page is not None,
                stdout=sys.stderr if output.json else None,
                on_progress=on_progress,
                progress_seconds=seconds,
            )
        with unsaved(result):
            if picture is not None:
                result.draw(picture)
            if page is not None:
                result.save_page(page)
    write(result)
    return 0 if result.fits else 1
