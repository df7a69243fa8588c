"""Traces of a job on one GPU, of which most are told from three runs and not run themselves.

Runs at two batch sizes make a loop (`recast`), which tells what a run at another would record. A third run,
at more than is asked for, has to bear it out; from then on all batch sizes up to that one are told. Where it
does not, or where there is no loop, each batch size is run.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from planner.capture.cudnn_target import equip
from planner.capture.session import record
from planner.capture.symbolic.builder import RUN_BATCHES
from planner.capture.symbolic.fit_lines import find_loop
from planner.capture.symbolic.kernel_calls import Calls, Run, UnsteadyError
from planner.capture.symbolic.recast import Loop, differs
from planner.errors import ModelError
from planner.jobs import Job
from planner.program import FROM_CHANCE, Alloc, Event, Free, Target, Trace

BEYOND = (
    8  # the third run is this part of the batch size above what is asked for: neighbours will be asked for
)


@dataclass(slots=True)
class Foretold:
    """The traces of a job, by batch size."""

    job: Job
    chip: Target
    build: Callable[[Job], nn.Module]
    _runs: dict[int, Run] = field(default_factory=dict)  # at the ends of the loop
    _loop: Loop | None = None
    _last: int = 0  # up to this batch size the loop was borne out
    _is_steady: bool = True

    def __call__(self, batch: int) -> Trace:
        """The trace at this batch size. Raises UsageError or ModelError."""
        if not self._is_steady:
            return self._run(batch)
        if batch in RUN_BATCHES:
            calls = Calls()
            self._runs[batch] = Run(self._run(batch, calls), tuple(calls.found))
            return self._runs[batch].trace
        if batch < min(RUN_BATCHES) or len(self._runs) < len(RUN_BATCHES):
            return self._run(batch)
        if batch > self._last:
            self._bear_out(batch + batch // BEYOND + 1)
        if self._loop is None or batch > self._last:
            return self._run(batch)
        told = self._loop.at(batch, equip(self.chip, self.job))
        return replace(told, events=tuple(_as_run(told.events, batch, self._loop.first_number)))

    def _bear_out(self, batch: int) -> None:
        """Hold the loop against a run."""
        try:
            if self._loop is None:
                self._loop = _found(self._runs, self.job.cublas_workspace_config)
            if not differs(self._loop.at(batch, equip(self.chip, self.job)), self._run(batch)):
                self._last = batch
                return
        except (UnsteadyError, ModelError):  # no loop, or a batch that is too large for torch itself
            pass
        self._is_steady = False

    def _run(self, batch: int, calls: Calls | None = None) -> Trace:
        capability, count = self.chip.capability, self.chip.sm_count
        return record(self.job, batch, capability, self.build, calls=calls, sm_count=count)


def _found(runs: dict[int, Run], cublas_config: str) -> Loop:
    if any(FROM_CHANCE in note for run in runs.values() for note in run.trace.notes):
        raise UnsteadyError("sizes that depend on values are on no line")
    first, second = (runs[batch] for batch in RUN_BATCHES)
    return find_loop(first, second, cublas_config)


def _as_run(events: Iterable[Event], batch: int, first: int) -> Iterator[Event]:
    """Lines at their batch size, and numbers from `first` on, which a loop uses again, each once."""
    names: dict[int, int] = {}
    count = first
    for event in events:
        if isinstance(event, Alloc):
            number = event.block
            if number >= first:
                names[number] = number = count
                count += 1
            elif not event.per_sample_bytes:
                yield event
                continue
            yield replace(event, block=number, fixed_bytes=event.bytes_at(batch), per_sample_bytes=0)
        elif isinstance(event, Free) and event.block >= first:
            yield Free(names[event.block])
        else:
            yield event
