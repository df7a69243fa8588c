"""Capture the traces of one rank of a job, and extrapolate traces of deep models from shallow models."""

from collections.abc import Callable
from time import perf_counter

from msgspec.structs import replace

from planner.errors import PlannerError
from planner.jobs import Depth, Job
from planner.program import (
    CHECKED,
    SHALLOW,
    NotRepeatedError,
    Target,
    Trace,
    TraceSource,
    compare_depths,
    first_divergence,
)


class RankTraces:
    """A source of the traces of one rank, which captures shallow models in place of deep models.

    If the model has a depth, models with 4 and 5 blocks are captured, and the events that one more block adds
    are repeated. Once for each kind of job, the model with 7 blocks is captured and compared with the
    extrapolated trace. If they differ, the whole model is captured.
    """

    def __init__(self, open_traces: Callable[[Job, Target], TraceSource], depth: Depth | None) -> None:
        self._open_traces = open_traces
        self._depth = depth  # above 7 blocks; None: the whole model is captured
        self._is_repeated: dict[tuple[Job, Target], bool] = {}  # by job apart from the number of its ranks
        self.seconds = 0.0  # spent in captures and extrapolation

    @property
    def is_repeated(self) -> bool:
        """Return whether all traces so far were extrapolated from shallow models."""
        return bool(self._is_repeated) and all(self._is_repeated.values())

    def trace(self, job: Job, batch: int, target: Target) -> Trace:
        """Return the trace of a job at a batch size. Raises the errors of a capture."""
        start = perf_counter()
        trace = self._deepened(job, batch, target)
        if trace is None:
            trace = self._open_traces(job, target)(batch)
        self.seconds += perf_counter() - start
        return trace

    def _deepened(self, job: Job, batch: int, target: Target) -> Trace | None:
        kind = replace(job, fsdp=min(job.fsdp, 2)), target
        if self._depth is None or not self._is_repeated.get(kind, True):
            return None
        try:
            repeated = compare_depths(
                self._at_depth(job, SHALLOW, batch, target),
                self._at_depth(job, SHALLOW + 1, batch, target),
            )
        except (NotRepeatedError, PlannerError):  # or there is no such shallow model
            self._is_repeated[kind] = False
            return None
        if kind not in self._is_repeated:
            checked = self._at_depth(job, CHECKED, batch, target)
            expected = repeated.with_more(CHECKED - SHALLOW)
            self._is_repeated[kind] = not first_divergence(expected, checked)
            if not self._is_repeated[kind]:
                return None
        return repeated.with_more(self._depth.blocks - SHALLOW)

    def _at_depth(self, job: Job, blocks: int, batch: int, target: Target) -> Trace:
        assert self._depth is not None
        return self._open_traces(self._depth.at(job, blocks), target)(batch)
