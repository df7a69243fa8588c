"""The levels of a run: when its peaks are reached, how high each step goes, and what gaps cost."""

from collections.abc import Iterator
from typing import Any

from planner.allocator import Replay
from planner.planning import Explanation, Moment
from planner.program import Phase
from planner.report.describe import short_op
from planner.report.document import Column, Table
from planner.report.units import NAME_WIDTH, memory_table, mib_column, mib_text, to_builtins

_PHASES = {
    Phase.INPUTS: "copying the batch to the GPU",
    Phase.FORWARD: "forward pass",
    Phase.BACKWARD: "backward pass",
    Phase.OPTIMIZER: "optimizer",
}


def peak_text(explanation: Explanation) -> str:
    """Return how high the peak is and when it is reached."""
    return f"{mib_text(explanation.run.peak_allocated_bytes)} MiB in {moment_text(explanation.peak)}"


def moment_text(moment: Moment) -> str:
    """Return when something happens."""
    return ", ".join(_moment(moment))


def _moment(moment: Moment) -> Iterator[str]:
    if moment.phase is Phase.SETUP:
        yield "moving the model to the GPU"
    else:
        yield f"step {moment.step}"
        yield _PHASES.get(moment.phase, str(moment.phase))
    if moment.module:
        yield f"module {moment.module}"
    if moment.op:
        yield short_op(moment.op)


def levels_table(explanation: Explanation) -> Table:
    """Return allocated and reserved peak and what is left at the end: by step, by phase of the step that has
    the peak, and of evaluation alone.
    """
    columns = (
        Column("Highest levels", min_width=NAME_WIDTH),
        *map(mib_column, ("allocated", "reserved", "at the end")),
    )
    return Table(columns, tuple((name, *map(mib_text, levels)) for name, levels in _levels(explanation)))


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
    largest = ", ".join(
        f"{mib_text(gap.size_bytes)} of {mib_text(gap.segment_bytes)}" for gap in gaps.largest_gaps[:3]
    )
    between = f"between blocks in use, largest {largest}" if largest else "between blocks in use"
    return memory_table(
        "At the reserved peak",
        [
            ("reserved", gaps.reserved_bytes, moment_text(gaps.moment)),
            ("allocated then", gaps.allocated_bytes, f"{mib_text(gaps.rounding_bytes)} of it by rounding up"),
            ("gaps", gaps.gap_bytes, between),
            ("free segments", gaps.free_segment_bytes, "given back to CUDA where memory is short"),
        ],
    )


def levels_to_json(explanation: Explanation) -> dict[str, Any]:
    """Return the keys of the fragmentation and the phases."""
    gaps = to_builtins(explanation.fragmentation)
    return {"fragmentation": gaps.pop("moment") | gaps, "phases": to_builtins(explanation.phases)}


def peaks_to_json(run: Replay | None) -> dict[str, int] | None:
    """Return the peaks of a run beside the training."""
    if run is None:
        return None
    return {
        "peak_allocated_bytes": run.peak_allocated_bytes,
        "peak_reserved_bytes": run.peak_reserved_bytes,
        "end_allocated_bytes": run.end_allocated_bytes,
    }
