"""`planner run`."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from planner.cli.bottom_line import live_progress
from planner.cli.commands.compare import picture_path
from planner.cli.commands.explain import page_path
from planner.cli.declared import AllocConf, GpuMib
from planner.cli.options import OutputOptions, Text, takes, whole
from planner.cli.output import answer, answering_first
from planner.cli.words import Argument, Option
from planner.errors import UsageError, unsaved
from planner.hardware import Device, find_device, generic_device
from planner.jobs import check_count
from planner.planning import Shown
from planner.report import Result

if TYPE_CHECKING:
    from planner.emulator import EmulatedRun
    from planner.planning.command import ExplainedRun

MAX_STEPS = 2**40


@dataclass(frozen=True, slots=True)
class EmulationOptions:
    """Which GPUs, and how the command runs on them."""

    gpu: Annotated[
        Text, Option(metavar="NAME", help="A GPU of the database: planner devices lists them.")
    ] = None
    gpu_mib: GpuMib = None
    gpus: Annotated[Text, Option(metavar="N", help="How many of them the command sees; 1 by default.")] = None
    stop_after: Annotated[
        Text, Option(metavar="N", help="End the command after this many optimizer steps.")
    ] = None
    snapshot: Annotated[
        Text,
        Option(
            metavar="FILE",
            help="Write the allocator's history, for torch's memory_viz and planner explain --against.",
        ),
    ] = None
    plot: Annotated[
        Text,
        Option(metavar="FILE", help="Explain the peak, and draw memory over time: a .png, .svg or .pdf."),
    ] = None
    html: Annotated[
        Text, Option(metavar="FILE", help="Explain the peak, and write a page (.html) with the memory.")
    ] = None
    alloc_conf: AllocConf = None
    copy_bytes: Annotated[
        Text,
        Option(
            metavar="N",
            help="Copies to the GPU of up to this size read back as they were: 65536 by default.",
        ),
    ] = None
    command: Annotated[
        list[str] | None,
        Argument(metavar="-- COMMAND...", help="The command, as on a machine with such GPUs."),
    ] = None


@dataclass(frozen=True, slots=True)
class RunResult(Result):
    """The records of the command's processes; `str` gives the text report."""

    run: "EmulatedRun"
    explained: "ExplainedRun | None" = None  # where a picture or a page was asked for

    def save(self, picture: Path | None, page: Path | None) -> None:
        """Write the picture and the page that were asked for. Raises DataFileError."""
        if self.explained is None:
            return
        from planner.report import run_summary

        summary, explanation = run_summary(self.explained), self.explained.explanation
        if picture is not None:
            from planner.report import draw_timeline

            draw_timeline(explanation, summary.caption, picture)
        if page is not None:
            from planner.report import save_page

            save_page(summary, explanation, self.explained.trace, Shown(), None, page)


@takes(EmulationOptions, OutputOptions)
def run_command(options: EmulationOptions, output: OutputOptions) -> int:
    """Run a command, unmodified, with the CUDA build of PyTorch on emulated GPUs."""
    from planner.emulator import RunOptions, compiled_dir, run_emulated
    from planner.planning.command import explain_run
    from planner.program import Outcome

    picture = None if options.plot is None else picture_path(options.plot)
    page = None if options.html is None else page_path(options.html)
    chosen = RunOptions(
        emulated_device(options.gpu, options.gpu_mib),
        _count("--gpus", options.gpus, "2", 64) or 1,
        _count("--stop-after", options.stop_after, "10", MAX_STEPS),
        whole("--copy-bytes", options.copy_bytes, "65536"),
        options.alloc_conf,
        None if options.snapshot is None else Path(options.snapshot),
        keeps_course=picture is not None or page is not None,
        output=sys.stderr if output.json else None,
    )

    def write(found: "RunResult | EmulatedRun") -> None:
        answer(found if isinstance(found, RunResult) else RunResult(found), output)

    with answering_first(write):
        with live_progress() as (tell, seconds):
            chosen = replace(chosen, progress_seconds=seconds)
            run = run_emulated(options.command or [], chosen, compiled_dir(), tell)
        with unsaved(run):
            result = RunResult(run, explain_run(run, chosen.device) if chosen.keeps_course else None)
        with unsaved(result):
            result.save(picture, page)
    write(result)
    return 1 if run.outcome is Outcome.DOES_NOT_FIT else 0


def emulated_device(gpu: Text, gpu_mib: Text) -> Device:
    """Return the GPU that is emulated. Raises UsageError where none is named, or two are."""
    if (gpu is None) == (gpu_mib is None):
        raise UsageError("say which GPU is emulated: --gpu NAME or --gpu-mib N, one of them")
    if gpu is not None:
        return find_device(gpu)
    return generic_device(whole("--gpu-mib", gpu_mib, "24000") or 0)


def _count(option: str, text: Text, example: str, most: int) -> int | None:
    value = whole(option, text, example)
    return None if value is None else check_count(option, value, most)
