"""Replay a process in the simulated allocator, or measure it with TensorFlow.

The process is described in a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TypedDict, Unpack, cast

from msgspec.structs import replace

from planner.allocator import AllocatorConfig, ReuseOrder, config_of_torch, parse_alloc_conf
from planner.api.request.budget import find_budget
from planner.api.request.options import Options
from planner.hardware import MIB, Budget, Device
from planner.jobs import Job, allowed_sources, load_catalogue
from planner.planning import CaptureMode, open_traces
from planner.planning.process import (
    TRACED_STEPS,
    Process,
    ProcessFile,
    ProcessLog,
    find_process_file,
    read_process,
    run_process,
)
from planner.program import OnProgress, Trace, ignore_progress
from planner.report import Report, Result, is_endless, short_op

NOTEBOOK, VARIABLE = "notebook", "variable"  # included processes, the defaults of the two functions
LIKELIEST = 0.5  # confidence without a margin, so that the results are expected values

Source = str | PathLike[str]  # the name of a process that comes with the planner, or a file


class ReplayOptions(TypedDict, total=False):
    """The options of a replay, as on the command line. None counts as not given."""

    models: str | PathLike[str] | None  # a catalogue instead of the planner's models.yaml
    allow_code: bool | None  # the files may name code: FILE.py:NAME
    gpu: str | Device | None
    gpu_mib: int | None
    allocator_cap_mib: int | None  # memory limit of torch's allocator
    alloc_conf: str | None
    cudnn: str | None  # source of convolution workspaces, as in `Options`
    on_progress: OnProgress | None  # called with one short line for each step that takes time


@dataclass(frozen=True, slots=True)
class ProcessResult(Result):
    """The memory readings of a replayed or measured process. `str` gives the text report."""

    process: Process
    log: ProcessLog
    framework: str
    assumptions: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    seconds: Mapping[str, float]
    budget: Budget | None  # None if the process was measured

    @property
    def ran_to_its_end(self) -> bool:
        """Return whether all memory requests of the process were served."""
        return self.log.failure is None

    def _report(self) -> Report:
        from planner.report import process_document, process_to_json

        return Report(
            partial(process_document, self.process, self.log, self.framework, self.assumptions),
            partial(
                process_to_json,
                self.process,
                self.log,
                self.framework,
                self.assumptions,
                self.unknown_ops,
                self.seconds,
                self.budget,
            ),
        )


def replay_process(source: Source = NOTEBOOK, **options: Unpack[ReplayOptions]) -> ProcessResult:
    """Replay a process in the simulated allocator of a GPU, and return its memory readings.

    Memory is unlimited if no GPU is named. Raises the errors of `planner.errors`; running out of memory is a
    result, not an error.
    """
    budget = find_budget(cast(Options, {**options, "confidence": LIKELIEST}))
    file = _read(source, options)
    alloc_conf = options.get("alloc_conf")
    config = parse_alloc_conf(alloc_conf or "", config_of_torch(file.torch))
    tracing = _Tracing(budget.device, options.get("cudnn"), options.get("on_progress") or ignore_progress)
    start = perf_counter()
    log = run_process(file.process, tracing.trace, replace(budget.limits, config=config))
    spent = {"import": tracing.import_seconds, "trace": tracing.trace_seconds}
    return ProcessResult(
        process=file.process,
        log=log,
        framework="torch",
        assumptions=(
            *_assumptions(budget, file.torch, config, alloc_conf, log.retries),
            *tracing.assumptions(),
        ),
        unknown_ops=tracing.unknown_ops(),
        seconds=spent | {"replay": perf_counter() - start - sum(spent.values())},
        budget=budget,
    )


def measure_process(source: Source = VARIABLE) -> ProcessResult:
    """Measure a process of plain tensors with TensorFlow on this machine's GPU, and return the readings.

    Raises the errors of `planner.errors`: UsageError for a process with models, ModelError without
    TensorFlow, NoGpuError without a GPU.
    """
    process = _read(source, {}).process
    start = perf_counter()
    from calibration.probe.tensorflow import load_tensorflow, measure

    tf = load_tensorflow()
    loaded = perf_counter()
    log = ProcessLog(measure(process, tf), retries=0, failure=None)
    return ProcessResult(
        process=process,
        log=log,
        framework="tensorflow",
        assumptions=(
            f"measured with TensorFlow {tf.__version__}, memory growth enabled; nothing is simulated",
        ),
        unknown_ops=(),
        seconds={"import": loaded - start, "measure": perf_counter() - loaded},
        budget=None,
    )


def _read(source: Source, options: ReplayOptions) -> ProcessFile:
    path = find_process_file(source) if isinstance(source, str) else Path(source)
    models, sources = options.get("models"), allowed_sources(options)
    catalogue = load_catalogue(None if models is None else Path(models), sources)
    return read_process(path, catalogue, sources)


def _assumptions(
    budget: Budget, torch: str, config: AllocatorConfig, alloc_conf: str | None, retries: int
) -> Iterator[str]:
    if budget.limits.allocator_limit_bytes is not None:
        endless = is_endless(budget.device.total)
        left = "" if endless else f", {budget.device.name} less the CUDA context and no margin"
        times = "once" if retries == 1 else f"{retries} times"
        released = f"; {times} it releases cached memory to stay within that" if retries else ""
        most = f"{budget.limits.allocator_limit_bytes / MIB:,.0f} MiB"
        yield f"torch's allocator may take {most}{left}{released}"
    else:
        yield "the GPU's memory has no end"
    if alloc_conf:
        yield f"the allocator runs with {alloc_conf}"
    if config.reuse_order is ReuseOrder.LOWEST_ADDRESS:
        yield f"of equal free blocks the one at the lowest address is reused, as by torch {torch}"


class _Tracing:
    """A cache of traces by job and batch size, which also collects capture times and assumptions."""

    def __init__(self, device: Device, cudnn: str | None, on_progress: OnProgress) -> None:
        self.import_seconds = self.trace_seconds = 0.0
        self._device = device
        self._cudnn = cudnn or ""
        self._on_progress = on_progress
        self._taken: dict[tuple[Job, int], Trace] = {}

    def trace(self, job: Job, batch: int) -> Trace:
        """Return the job's trace at a batch size, captured on the first call."""
        if (job, batch) not in self._taken:
            start = perf_counter()
            queried = job.replace(cudnn=self._cudnn)
            tracer = open_traces(queried, self._device.target, self._on_progress, mode=CaptureMode.RUNS)
            opened = perf_counter()
            self._on_progress(f"tracing {job.model.name} at batch {batch}")
            self._taken[job, batch] = tracer(batch)
            self.import_seconds += opened - start
            self.trace_seconds += perf_counter() - opened
        return self._taken[job, batch]

    def unknown_ops(self) -> tuple[str, ...]:
        """Return the operators whose workspace memory is unknown, sorted by name."""
        return tuple(sorted({op for trace in self._taken.values() for op in trace.unknown_ops}))

    def assumptions(self) -> Iterator[str]:
        """Yield the assumptions of the traces as lines of text."""
        if not self._taken:
            return
        major, minor = self._device.capability
        yield f"kernels as for compute capability {major}.{minor} ({self._device.capability_source})"
        yield f"the first {TRACED_STEPS} steps of a training loop are traced; the others repeat the last"
        yield from dict.fromkeys(note for trace in self._taken.values() for note in trace.notes)
        if self.unknown_ops():
            ops = ", ".join(map(short_op, self.unknown_ops()))
            largest = "; cuDNN's for convolutions is the largest" if "convolution" in ops else ""
            yield f"scratch memory is not counted for {ops}{largest}"
