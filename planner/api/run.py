"""Run commands on emulated GPUs.

This is `planner run` and `planner max-batch -- COMMAND` for Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.api.request.budget import DEFAULT_CONFIDENCE
from planner.api.request.request import checked_multiple
from planner.emulator import EmulatedRun, RunOptions, compiled_dir, run_emulated
from planner.errors import UnsavedError, UsageError, unsaved
from planner.hardware import Device, find_device, generic_device
from planner.jobs import check_count
from planner.planning import DisplayLimits
from planner.planning.command import CommandPlan, ExplainedRun, explain_run, find_largest_batch
from planner.program import OnProgress, Outcome, ignore_progress
from planner.report import Report, Result, report_of

MAX_GPUS = 64
MAX_STEPS = 2**40
MAX_COPY_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class RunResult(Result):
    """The recorded memory of a command's processes on emulated GPUs. `str` gives the text report."""

    run: EmulatedRun
    explained: ExplainedRun | None = None  # None if no explanation was requested

    @property
    def fits(self) -> bool:
        """Return whether the command ran within the memory of its GPUs."""
        return self.run.outcome is not Outcome.DOES_NOT_FIT

    def draw(self, path: Path | str) -> None:
        """Draw the memory of an explained run over its events to a file.

        If the run is not explained, nothing is drawn. Raises DataFileError.
        """
        if self.explained is not None:
            from planner.report import draw_timeline, run_summary

            draw_timeline(self.explained.explanation, run_summary(self.explained).caption, Path(path))

    def save_page(self, path: Path | str) -> None:
        """Write the explanation of an explained run as an HTML page.

        If the run is not explained, nothing is written. Raises DataFileError.
        """
        if self.explained is not None:
            from planner.report import run_summary, save_page

            summary, explained = run_summary(self.explained), self.explained
            save_page(summary, explained.explanation, explained.trace, DisplayLimits(), None, Path(path))

    def _report(self) -> Report:
        from planner.report import run_document, run_to_json

        return report_of(run_document, run_to_json, self.run, self.explained)


@dataclass(frozen=True, slots=True)
class CommandResult(Result):
    """The largest batch size with which a command fits on emulated GPUs. `str` gives the text report."""

    plan: CommandPlan

    @property
    def max_batch(self) -> int:
        """Return the largest batch size that fits, or 0 if no batch fits."""
        return self.plan.search.largest

    @property
    def comfortable_batch(self) -> int:
        """Return the largest batch size that runs without retries of the allocator, or 0."""
        return self.plan.search.comfortable

    def _report(self) -> Report:
        from planner.report import command_plan_document, command_plan_to_json

        return report_of(command_plan_document, command_plan_to_json, self.plan)


def run(
    command: Sequence[str],
    *,
    gpu: str | None = None,
    gpu_mib: int | None = None,
    gpus: int | None = None,
    stop_after: int | None = None,
    copy_bytes: int | None = None,
    alloc_conf: str | None = None,
    snapshot: Path | None = None,
    explain: bool = False,
    stdout: Any = None,
    on_progress: OnProgress = ignore_progress,
    progress_seconds: float = 10.0,
) -> RunResult:
    """Run an unmodified command on emulated GPUs, and return the recorded memory of its processes.

    `gpus` is the number of GPUs that the command sees, `stop_after` a number of optimizer steps, `explain`
    whether the peak is explained, `stdout` the destination of the command's standard output, and
    `progress_seconds` the time between calls of `on_progress`. Raises the errors of `planner.errors`;
    running out of memory is a result, not an error.
    """
    options = RunOptions(
        _emulated_device(gpu, gpu_mib),
        _gpu_count(gpus),
        None if stop_after is None else check_count("--stop-after", stop_after, MAX_STEPS),
        None if copy_bytes is None else check_count("--copy-bytes", copy_bytes, MAX_COPY_BYTES, least=0),
        alloc_conf,
        snapshot,
        keeps_script_log=explain,
        output=stdout,
        progress_seconds=progress_seconds,
    )
    try:
        run = run_emulated(command, options, compiled_dir(), on_progress)
    except UnsavedError as error:  # the run succeeded, but the allocator's history could not be written
        assert isinstance(error.result, EmulatedRun)
        raise UnsavedError(error, RunResult(error.result)) from error
    result = RunResult(run)
    with unsaved(result):
        return RunResult(run, explain_run(run, options.device)) if explain else result


def max_batch_of_command(
    command: Sequence[str],
    *,
    gpu: str | None = None,
    gpu_mib: int | None = None,
    gpus: int | None = None,
    stop_after: int | None = None,
    alloc_conf: str | None = None,
    confidence: float | None = None,
    multiple_of: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> CommandResult:
    """Return the largest batch size with which a command fits on emulated GPUs.

    Each run replaces `{batch}` in the command by a batch size, and ends after `stop_after` optimizer steps;
    by default the run at the answer's batch size continues to the end of its first evaluation. Raises the
    errors of `planner.errors`; a largest batch size of 0 is a result, not an error.
    """
    stop = None if stop_after is None else check_count("--stop-after", stop_after, MAX_STEPS)
    options = RunOptions(_emulated_device(gpu, gpu_mib), _gpu_count(gpus), stop, alloc_conf=alloc_conf)
    probability = DEFAULT_CONFIDENCE if confidence is None else confidence
    multiple = checked_multiple(multiple_of)
    return CommandResult(
        find_largest_batch(command, options, probability, multiple, compiled_dir(), on_progress)
    )


def _gpu_count(gpus: int | None) -> int:
    return 1 if gpus is None else check_count("--gpus", gpus, MAX_GPUS)


def _emulated_device(gpu: str | None, gpu_mib: int | None) -> Device:
    """Return the GPU named `gpu`, or a generic GPU with `gpu_mib` MiB of memory.

    Raises UsageError unless exactly one of the parameters is given.
    """
    if gpu is not None and gpu_mib is None:
        return find_device(gpu)
    if gpu is None and gpu_mib is not None:
        return generic_device(gpu_mib)
    raise UsageError("say which GPU is emulated: --gpu NAME or --gpu-mib N, one of them")
