"""Fit recorded histories at several batch sizes to a program of each rank for any batch size."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import AllocatorConfig, MemoryLimits, config_of_torch, parse_alloc_conf, replay_trace
from planner.emulator import EmulatedRun, ProcessHistory, trace_of
from planner.errors import UsageError
from planner.hardware import UNLIMITED_BYTES, Device
from planner.program import (
    AffineAlloc,
    NotAffineError,
    Outcome,
    Phase,
    PhaseStart,
    Program,
    Trace,
    fit_traces,
    rounded_affine,
)

_SCRATCH_DEPTHS = range(4)


class RankProgram(Struct, frozen=True):
    """The program of one process, and its memory limits on one GPU."""

    program: Program  # without kernel calls
    limits: MemoryLimits


class CommandFit(Struct, frozen=True):
    """The fitted programs of all ranks of a command."""

    ranks: tuple[RankProgram, ...]
    batches: tuple[int, int]  # the batch sizes whose histories were fitted

    def outcome(self, batch: int) -> Outcome:
        """Replay the programs of all ranks at a batch size, and return the worst outcome."""
        runs = (replay_trace(rank.program.instantiate(batch), rank.limits) for rank in self.ranks)
        return max((run.outcome for run in runs), key=list(Outcome).index)

    @property
    def depends_on_batch(self) -> bool:
        """Return whether the size of any block of any rank depends on the batch size."""
        events = (event for rank in self.ranks for event in rank.program.events)
        return any(isinstance(event, AffineAlloc) and event.bytes_per_sample for event in events)


def fit_runs(runs: Mapping[int, EmulatedRun], near: int, device: Device) -> CommandFit | str:
    """Return programs of all ranks fitted to two of the recorded runs, or the reason why none fit.

    The fit is most accurate at the batch size `near`. Of two histories that align, the history nearest to
    `near` gives the sizes that are not linear, such as workspaces. The other history is as far away as
    possible, so that slopes are accurate. As few blocks as possible are taken for scratch. Returns the reason
    as text if no two histories align.
    """
    reason = "its memory was recorded at one batch size only"
    for high in sorted(runs, key=lambda batch: (abs(batch - near), batch)):
        for low in sorted(runs, key=lambda batch: (-abs(batch - high), batch)):
            for depth in _SCRATCH_DEPTHS if low != high else ():
                fit = _fit_pair(low, runs[low], high, runs[high], device, depth)
                if isinstance(fit, CommandFit):
                    return fit
                reason = fit if depth == 0 else reason
    return reason


def _fit_pair(
    low: int, lower: EmulatedRun, high: int, higher: EmulatedRun, device: Device, scratch_depth: int
) -> CommandFit | str:
    if [_key(one) for one in lower.histories] != [_key(one) for one in higher.histories]:
        return f"other processes use the GPUs at batch {low} than at batch {high}"
    steps = _common_steps(lower, higher)
    ranks = []
    for one, other in zip(lower.histories, higher.histories, strict=True):
        try:
            limits = limits_of(other, higher, device)
            first = _until(trace_of(one, low, scratch_depth), steps)
            second = _until(trace_of(other, high, scratch_depth), steps)
        except (ValueError, UsageError) as error:
            return str(error)
        try:
            program = fit_traces(first, second, workspace_fit=rounded_affine)
        except NotAffineError as error:
            return str(error)
        ranks.append(RankProgram(program, limits))
    return CommandFit(tuple(ranks), (low, high))


def _key(history: ProcessHistory) -> tuple[int, int]:
    return history.rank, history.device


def _common_steps(lower: EmulatedRun, higher: EmulatedRun) -> int | None:
    """Return the number of optimizer steps to keep of both runs, or None to keep all."""
    counts = {(one.largest.step_count, one.largest.was_stopped) for one in (lower, higher)}
    return None if len(counts) == 1 else min(count for count, _ in counts)


def _until(trace: Trace, steps: int | None) -> Trace:
    """Return the trace up to the end of optimizer step `steps`, or the whole trace if `steps` is None."""
    if steps is None:
        return trace
    following = PhaseStart(steps + 1, Phase.FORWARD)
    return replace(trace, events=tuple(takewhile(lambda event: event != following, trace.events)))


def limits_of(history: ProcessHistory, run: EmulatedRun, device: Device) -> MemoryLimits:
    """Return a process's allocator limits: the GPU's usable memory minus memory outside of the allocator."""
    usable = device.usable.value
    record = next(one for one in run.records if (one.pid, one.device) == (history.pid, history.device))
    outside = max(0, record.peak.process_bytes - record.peak.reserved_bytes - device.context.value)
    limit = None if history.fraction >= 1 else int(history.fraction * usable)
    return MemoryLimits(usable - device.context.value - outside, limit, usable, _config(history, run))


def _config(history: ProcessHistory, run: EmulatedRun) -> AllocatorConfig:
    """Return the allocator's configuration in a recorded run, from its options and its version of torch."""
    version = dict(run.largest.versions).get("torch", "")
    return parse_alloc_conf(history.alloc_conf, config_of_torch(version))


def end_and_peak(run: EmulatedRun, batch: int) -> Iterator[tuple[int, int]]:
    """Yield each rank's allocated bytes at the end and reserved peak, by replays without memory limits.

    A rank with an incomplete history is skipped.
    """
    for history in run.histories:
        with suppress(ValueError, UsageError):
            limits = MemoryLimits(total_bytes=UNLIMITED_BYTES, config=_config(history, run))
            replay = replay_trace(trace_of(history, batch), limits)
            yield replay.end_allocated_bytes, replay.peak_reserved_bytes
