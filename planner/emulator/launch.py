"""Run a command on emulated GPUs, and read the records of its processes.

The command is not modified.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from msgspec import Struct

from planner._support.atomic_write import write_bytes
from planner._support.processes import end_processes
from planner.emulator.gpu import describe_gpu
from planner.emulator.history import read_histories
from planner.emulator.record import EmulatedRun, GpuRecord, program_name, read_gpu_peaks, read_records
from planner.errors import DataFileError, ModelError, PlannerError, UsageError, unsaved
from planner.hardware import MIB, Device
from planner.program import OnProgress

_STARTUP = Path(__file__).with_name("child") / "startup"  # has the sitecustomize.py
_RECORDS = "PLANNER_EMULATED_RECORDS"  # in the environment of all processes of the command, of no others
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0  # for a command that is sent SIGTERM
_COPY_BYTES = 65536  # sizes, counts and flags that a script or the ranks of a job read back


class RunOptions(Struct, frozen=True):
    """The options for a run of a command: the emulated GPUs, when it ends, and what it records."""

    device: Device
    gpu_count: int = 1
    stop_after: int | None = None  # number of optimizer steps to run; None to run the command to its end
    copy_bytes: int | None = None  # copies up to this size have contents; None for 64 KiB
    alloc_conf: str | None = None  # PYTORCH_ALLOC_CONF; None to leave the environment's value
    snapshot: Path | None = None  # the file for the history of the largest process, as torch writes it
    keeps_histories: bool = False  # whether to read the allocator's history of each process
    history_steps: int | None = None  # number of optimizer steps in the histories; None for all steps
    keeps_script_log: bool = False  # whether to read histories that include phases, modules and held tensors
    output: Any = None  # the file for the command's standard output; None for the planner's own
    errors: Any = None  # the file for the command's standard error; None for the planner's own
    progress_seconds: float = 10.0  # between lines of progress
    stops_after_evaluation: bool = False  # whether to stop at the first optimizer step after an evaluation
    stops_out_of_memory: bool = False  # whether an out-of-memory error ends a script that would catch it


def run_emulated(
    command: Sequence[str], options: RunOptions, cache: Path, on_progress: OnProgress
) -> EmulatedRun:
    """Run a command on emulated GPUs and return the records of its processes.

    `cache` is the folder of the compiled stand-in libraries. `on_progress` gets a line every
    `options.progress_seconds`. Raises UsageError if the command cannot be started or its environment has no
    CUDA build of torch, ModelError if it fails for another reason than memory or uses no GPU, UnsavedError,
    with the run, if the snapshot cannot be written.
    """
    if not command:
        raise UsageError("no command: write it behind --, as in planner run --gpu L4 -- python train.py")
    start = perf_counter()
    with TemporaryDirectory(prefix="planner-run-") as name:
        folder = Path(name)
        environment = {**os.environ, **_variables(options, folder, cache)}
        report = _reporter(folder, options.progress_seconds, on_progress)
        code = _run(command, environment, options, report, on_progress)
        refusal = folder / "refusal"
        if refusal.is_file():
            raise UsageError(refusal.read_text(encoding="utf-8"))
        records, any_used = read_records(folder), any(folder.glob("*.json"))
        run = EmulatedRun(
            options.device.name,
            options.gpu_count,
            tuple(command),
            code,
            records,
            perf_counter() - start,
            _assumptions(options),
            read_histories(folder) if options.keeps_histories or options.keeps_script_log else (),
            read_gpu_peaks(folder, options.gpu_count),
        )
        if options.snapshot is not None and records:
            with unsaved(run):
                _save_snapshot(run, folder, options.snapshot)
    if not records:
        if code:
            used = "before its first optimizer step" if any_used else "before it used a GPU"
            raise ModelError(f"{program_name(command)}: {run.ending} {used}")
        raise ModelError(
            f"{program_name(command)}: it ended without using a GPU; check that it trains on cuda"
        )
    if code and run.failure is None and not run.crash:
        raise ModelError(f"{program_name(command)}: {run.ending}, and not for want of GPU memory")
    return run


def _variables(options: RunOptions, folder: Path, cache: Path) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    variables = {
        "PLANNER_EMULATED_GPU": describe_gpu(options.device, options.gpu_count),
        "PLANNER_EMULATED_CACHE": str(cache),
        _RECORDS: str(folder),
        "PLANNER_EMULATED_COPY_BYTES": str(_COPY_BYTES if options.copy_bytes is None else options.copy_bytes),
        "PLANNER_EMULATED_HISTORY": _history_kinds(options),
        "PLANNER_EMULATED_HISTORY_STEPS": str(options.history_steps or 0),
        "PLANNER_EMULATED_STOP_AFTER": str(options.stop_after or 0),
        "PLANNER_EMULATED_STOP_AFTER_EVALUATION": "1" if options.stops_after_evaluation else "",
        "PLANNER_EMULATED_STOP_OUT_OF_MEMORY": "1" if options.stops_out_of_memory else "",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # its timings are not of a real GPU
        "PYTHONPATH": f"{_STARTUP}{os.pathsep}{inherited}" if inherited else str(_STARTUP),
    }
    if options.alloc_conf is not None:
        variables |= {"PYTORCH_ALLOC_CONF": options.alloc_conf, "PYTORCH_CUDA_ALLOC_CONF": options.alloc_conf}
    return variables


def _history_kinds(options: RunOptions) -> str:
    """Return the kinds of histories that the processes write, joined by blanks."""
    kinds = {
        "snapshot": options.snapshot is not None,
        "events": options.keeps_histories or options.keeps_script_log,
        "script_log": options.keeps_script_log,
    }
    return " ".join(kind for kind, is_on in kinds.items() if is_on)


def _assumptions(options: RunOptions) -> tuple[str, ...]:
    context = options.device.context
    return (
        "emulated, not measured: PyTorch, its allocator, autograd and cuDNN's heuristics are the real ones, "
        "kernels compute nothing, and take equally long wherever torch chooses by their time",
        f"the CUDA context takes {context.value / MIB:.0f} MiB: {context.source}",
        "values are zero where the script reads results back, so what it decides by them may differ",
    )


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    options: RunOptions,
    report: Callable[[], None],
    on_progress: OnProgress,
) -> int:
    try:
        process = subprocess.Popen(command, env=environment, stdout=options.output, stderr=options.errors)
    except OSError as error:
        raise UsageError(f"{command[0]}: cannot be started: {error.strerror}") from error
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
            report()
    finally:
        left = _end(process, f"{_RECORDS}={environment[_RECORDS]}")
        if left:
            on_progress(f"processes {', '.join(map(str, sorted(left)))} cannot be ended")


def _save_snapshot(run: EmulatedRun, folder: Path, path: Path) -> None:
    """Copy the allocator's history of the largest process to a file.

    The largest process takes most memory. Raises DataFileError if the process left no history, unless the
    command failed for another reason than memory.
    """
    largest = folder / f"{run.largest.rank}-{run.largest.pid}.pickle"
    if largest.is_file():
        write_bytes(path, largest.read_bytes())
    elif not run.exit_code or run.failure is not None:
        raise DataFileError(
            f"{path}: not written: process {run.largest.pid} left no history of its allocator, as one that "
            "is killed; try --stop-after 3"
        )


def _end(process: "subprocess.Popen[bytes]", mark: str) -> frozenset[int]:
    """End a command and all processes that it left, and return the ids of processes that cannot be ended.

    `mark` is the environment variable, as `NAME=VALUE`, that all processes of the command have.
    """
    if process.poll() is None:
        process.terminate()
    left = end_processes(mark, _GRACE_SECONDS)
    if process.poll() is None:  # on a system where processes cannot be found by their environment
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        process.kill()
        process.wait()
    return left


def _reporter(folder: Path, seconds: float, on_progress: OnProgress) -> Callable[[], None]:
    """Return a function that reports the largest process's step and peaks, at most once in `seconds`."""
    last = perf_counter()

    def report() -> None:
        nonlocal last
        if perf_counter() - last < seconds:
            return
        last = perf_counter()
        try:
            records = read_records(folder)
        except PlannerError:  # a record that is being replaced
            return
        if records:
            record = max(records, key=lambda one: one.peak.process_bytes)
            on_progress(_progress_line(record))

    return report


def _progress_line(record: GpuRecord) -> str:
    peak = record.peak
    where = f"step {record.step_count}" if record.step_count else "before the first optimizer step"
    return (
        f"{where}: peak {peak.allocated_bytes / MIB:,.0f} MiB allocated, "
        f"{peak.reserved_bytes / MIB:,.0f} reserved, {peak.process_bytes / MIB:,.0f} in nvidia-smi"
    )
