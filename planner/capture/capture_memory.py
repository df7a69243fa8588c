"""Remember results of a job's captures for captures at other batch sizes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from planner.capture.values.interpreter import DataDependentError
from planner.capture.values.reads import ReadLogs
from planner.program import GrowthSource, Trace


@dataclass(slots=True)
class CaptureMemory:
    """Results that captures of one job share: results of value reads, and source lines of growth sources.

    A growth source allocates more blocks with every step.
    """

    first_read: DataDependentError | None = None  # None if shapes alone are enough
    logs: ReadLogs = field(default_factory=ReadLogs)
    growth_lines: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # by (module, op)
    most_blocks: float = inf  # a capture that allocates more blocks raises BatchTooLargeError

    def with_lines(self, trace: Trace, capture: Callable[[], Trace]) -> Trace:
        """Return the trace with its growth sources' lines, from earlier captures or else from `capture`.

        `capture` returns the same trace with lines. It is called if a line is not known from before.
        """
        if any((one.module, one.op) not in self.growth_lines for one in trace.growth_sources):
            self.growth_lines.update(
                ((one.module, one.op), (one.source, one.code)) for one in capture().growth_sources
            )
        return replace(trace, growth_sources=tuple(map(self._with_line, trace.growth_sources)))

    def _with_line(self, growth: GrowthSource) -> GrowthSource:
        source, code = self.growth_lines.get((growth.module, growth.op), ("", ""))
        return replace(growth, source=source, code=code)
