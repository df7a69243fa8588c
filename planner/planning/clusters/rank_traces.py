"""Capture traces of one rank of a job, and measure the seconds that the captures take."""

from collections.abc import Callable
from time import perf_counter

from planner.jobs import Job
from planner.program import Fact, Target, Trace, TraceSource


class RankTraces:
    """A source of traces of one rank, which counts the seconds spent in captures."""

    def __init__(self, open_traces: Callable[[Job, Target], TraceSource]) -> None:
        self._open_traces = open_traces
        # Whether all captured traces were extrapolated from shallow models; None before the first trace.
        self.is_repeated: bool | None = None
        self.seconds = 0.0  # spent in captures and extrapolation

    def trace(self, job: Job, batch: int, target: Target) -> Trace:
        """Return the trace of a job at a batch size, and add the time of the capture to `seconds`.

        Raises the errors of a capture.
        """
        start = perf_counter()
        trace = self._open_traces(job, target)(batch)
        self.is_repeated = self.is_repeated is not False and Fact.REPEATED_BLOCKS in trace.facts
        self.seconds += perf_counter() - start
        return trace
