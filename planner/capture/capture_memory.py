"""What captures of one job at some batch sizes show for captures at other batch sizes."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from planner.capture.values.interpreter import DataDependentError
from planner.capture.values.reads import ReadLog
from planner.program import GrowthSource, Trace


@dataclass(slots=True)
class CaptureMemory:
    """Reads of values in earlier captures of a job, and the lines behind its growing memory."""

    first_read: DataDependentError | None = None  # shapes alone do not do
    logs: dict[int, ReadLog] = field(default_factory=dict)  # of small batch sizes
    growth_lines: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # by module, operator

    def knows_lines(self, trace: Trace) -> bool:
        """Return whether the line of each source of growing memory is known."""
        return all((one.module, one.op) in self.growth_lines for one in trace.growth_sources)

    def add_lines(self, trace: Trace) -> None:
        """Remember the lines of a trace that was captured with them."""
        self.growth_lines.update(
            ((one.module, one.op), (one.source, one.code)) for one in trace.growth_sources
        )

    def with_lines(self, trace: Trace) -> Trace:
        """Return the trace with the line of code of each source of growing memory."""
        return replace(trace, growth_sources=tuple(map(self._with_line, trace.growth_sources)))

    def _with_line(self, growth: GrowthSource) -> GrowthSource:
        source, code = self.growth_lines.get((growth.module, growth.op), ("", ""))
        return replace(growth, source=source, code=code)
