"""The command `planner run`, which runs a user's command on emulated GPUs."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from planner.cli.bottom_line import live_progress
from planner.cli.options import AllocConf, GpuMib, option, with_options
from planner.cli.output import Output, emit, emit_before_raising
from planner.cli.paths import page_path, plot_path
from planner.errors import unsaved

_EMULATION = {
    "gpu": Annotated[str | None, option("NAME", "A GPU of the database: planner devices lists them.")],
    "gpu_mib": GpuMib,
    "gpus": Annotated[int | None, option("N", "How many of them the command sees; 1 by default.")],
    "stop_after": Annotated[int | None, option("N", "End the command after this many optimizer steps.")],
    "snapshot": Annotated[
        Path | None,
        option(
            "FILE",
            "Write the allocator's history, for torch's memory_viz and planner explain --against.",
        ),
    ],
    "plot": Annotated[
        str | None, option("FILE", "Explain the peak, and draw memory over time: a .png, .svg or .pdf.")
    ],
    "html": Annotated[
        str | None, option("FILE", "Explain the peak, and write a page (.html) with the memory.")
    ],
    "alloc_conf": AllocConf,
    "copy_bytes": Annotated[
        int | None,
        option("N", "Copies to the GPU of up to this size read back as they were: 65536 by default."),
    ],
}


@with_options(_EMULATION)
def run_command(
    options: dict[str, Any],
    output: Output,
    command: Annotated[
        list[str] | None,
        Argument(metavar="-- COMMAND...", help="The command, as on a machine with such GPUs."),
    ],
) -> int:
    """Run a command, unmodified, with the CUDA build of PyTorch on emulated GPUs."""
    picture, page = plot_path(options.pop("plot")), page_path(options.pop("html"))
    from planner.api.run import run

    write = partial(emit, output=output)
    with emit_before_raising(write):
        with live_progress() as (on_progress, seconds):
            result = run(
                command or [],
                explain=picture is not None or page is not None,
                stdout=sys.stderr if output.json else None,
                on_progress=on_progress,
                progress_seconds=seconds,
                **options,
            )
        with unsaved(result):
            if picture is not None:
                result.draw(picture)
            if page is not None:
                result.save_page(page)
    write(result)
    return 0 if result.fits else 1
