"""The levels of a run: when its peaks are reached, how high each step goes, and what gaps cost."""

from collections.abc import Iterator

from planner.planning import Explanation
from planner.report.describe import place_text
from planner.report.document import Table
from planner.report.units import figures_table, memory_table, mib_text


def peak_text(explanation: Explanation) -> str:
    """Return how high the peak is and when it is reached."""
    return f"{mib_text(explanation.run.peak_allocated_bytes)} MiB in {place_text(explanation.peak)}"


def levels_table(explanation: Explanation) -> Table:
    """Return levels by step, by phase of the step that has the peak, and of evaluation alone."""
    return figures_table("Highest levels", ("allocated", "reserved", "at the end"), _levels(explanation))


def _levels(explanation: Explanation) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for step in explanation.steps:
        name = "set-up" if step.step == 0 else f"step {step.step}"
        yield name, (step.allocated_bytes, step.reserved_bytes, step.end_allocated_bytes)
        for phase in explanation.phases:
            if phase.step == step.step == explanation.peak.step > 0:
                levels = (phase.allocated_bytes, phase.reserved_bytes, phase.end_allocated_bytes)
                yield f"  {phase.phase}", levels
    run = explanation.evaluation
    if run is not None:
        yield "evaluation alone", (run.peak_allocated_bytes, run.peak_reserved_bytes, run.end_allocated_bytes)


def fragmentation_table(explanation: Explanation) -> Table:
    """Return what was reserved and not allocated."""
    gaps = explanation.fragmentation
    largest = [
        f"{mib_text(gap.size_bytes)} of {mib_text(gap.segment_bytes)}" for gap in gaps.largest_gaps[:3]
    ]
    between = f"between blocks in use, largest {', '.join(largest)}" if largest else "between blocks in use"
    rows = [
        ("reserved", gaps.reserved_bytes, place_text(gaps.moment)),
        ("allocated then", gaps.allocated_bytes, f"{mib_text(gaps.rounding_bytes)} of it by rounding up"),
        ("gaps", gaps.gap_bytes, between),
        ("free segments", gaps.free_segment_bytes, "given back to CUDA where memory is short"),
    ]
    return memory_table("At the reserved peak", rows)
