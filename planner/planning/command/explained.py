"""Explain the memory of an emulated run's largest process from the history of its allocator."""

from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import MemoryLimits, replay_trace
from planner.emulator import EmulatedRun, GpuRecord, ProcessHistory, ScriptLog
from planner.errors import DataFileError, UsageError
from planner.hardware import MIB, Device
from planner.planning.attribution import Explanation, explain
from planner.planning.command.attribution import attributed_trace
from planner.planning.command.fit import limits_of
from planner.program import Outcome, Trace, workspace_bytes

BATCH = 1  # stands for the unknown batch size of a recorded run


class ExplainedRun(Struct, frozen=True):
    """An emulated run, with the trace of its largest process and the explanation of its memory."""

    run: EmulatedRun
    device: Device
    trace: Trace
    explanation: Explanation
    notes: tuple[str, ...]  # on the data behind the explanation

    @property
    def record(self) -> GpuRecord:
        """Return the GPU record of the explained process."""
        return self.run.largest

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of the process by category, and its context and fragmentation.

        Context is the peak of the process minus the reserved peak. Fragmentation is the reserved peak minus
        the allocated peak.
        """
        replay = self.explanation.run
        return {
            "context": self.record.peak.process_bytes - replay.peak_reserved_bytes,
            **{category.value: size_bytes for category, size_bytes in self.explanation.at_peak.items()},
            "fragmentation": replay.peak_reserved_bytes - replay.peak_allocated_bytes,
        }


def explain_run(run: EmulatedRun, device: Device) -> ExplainedRun:
    """Explain the memory of a run's largest process by its history. Raises DataFileError if that fails."""
    history = _history_of(run)
    try:
        trace = attributed_trace(history, BATCH, _workspace_bytes(history, device))
        limits = _limits(history, run, device, trace)
        explanation = explain(trace, limits)
    except (ValueError, UsageError) as error:
        raise DataFileError(f"the run cannot be explained: {error}; try --stop-after 3") from error
    notes = (*_notes(history, run), *_differences(run.largest, explanation))
    return ExplainedRun(run, device, trace, explanation, notes)


def _history_of(run: EmulatedRun) -> ProcessHistory:
    record = run.largest
    key = record.rank, record.pid, record.device
    history = next((one for one in run.histories if (one.rank, one.pid, one.device) == key), None)
    if history is None or history.script_log is None:
        raise DataFileError(
            f"process {record.pid} left no history of its allocator, as one that is killed; "
            "try --stop-after 3"
        )
    failure = record.failure
    if failure is None or not failure.was_raised:
        return history
    last = max((i for i, event in enumerate(history.events) if event.action == "oom"), default=None)
    return replace(history, events=history.events[:last])


def _workspace_bytes(history: ProcessHistory, device: Device) -> int:
    assert history.script_log is not None
    with suppress(UsageError):  # torch takes the default if it cannot parse the setting
        return workspace_bytes(device.capability, history.script_log.cublas_workspace)
    return workspace_bytes(device.capability)


def _limits(history: ProcessHistory, run: EmulatedRun, device: Device, trace: Trace) -> MemoryLimits:
    """Return the memory limits of the process, or unlimited memory if the trace does not fit in them."""
    limits = limits_of(history, run, device)
    if replay_trace(trace, limits).outcome is Outcome.DOES_NOT_FIT:
        return MemoryLimits(total_bytes=limits.total_bytes, config=limits.config)
    return limits


def _notes(history: ProcessHistory, run: EmulatedRun) -> Iterator[str]:
    script_log: ScriptLog | None = history.script_log
    assert script_log is not None
    if len(run.records) > 1:
        yield f"of {len(run.records)} processes on GPUs, rank {history.rank} on GPU {history.device} is shown"
    yield (
        "parameters, gradients, optimizer state and inputs are recognized by their addresses; activations "
        "are allocated in the forward pass and alive when the backward pass starts; workspaces are freed "
        "before another block is allocated, or held by cuBLAS; temporaries are the rest"
    )
    yield "in the backward pass, blocks have no module, but for gradients"
    for missing in script_log.missing:
        yield f"not recorded: {missing}"


def _differences(record: GpuRecord, explanation: Explanation) -> Iterator[str]:
    peak, run = record.peak, explanation.run
    pairs = (
        ("allocated", peak.allocated_bytes, run.peak_allocated_bytes),
        ("reserved", peak.reserved_bytes, run.peak_reserved_bytes),
    )
    for name, real, replayed in pairs:
        if real != replayed:
            yield (
                f"peak {name}: {replayed / MIB:,.1f} MiB by the replay of the history that is shown, "
                f"{real / MIB:,.1f} in the run"
            )
