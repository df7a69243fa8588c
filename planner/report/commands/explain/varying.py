"""Report the memory of the worst batch of sampled runs.

It is shown by category and module, with the memory that earlier steps add.
"""

from typing import Any

from planner.planning import DisplayLimits, Estimate, Explanation, SampledRun, VaryingPlan
from planner.report.commands.estimates.tables import closing_section
from planner.report.commands.explain.report import breakdown_sections, explanation_to_json
from planner.report.commands.explain.tables import fragmentation_table, peak_text
from planner.report.commands.varying.plan import (
    sampling_assumptions,
    shape_text,
    sides_table,
    style,
    varying_to_json,
    verdict,
)
from planner.report.describe import job_entry, place_text
from planner.report.document import Block, Bullets, Document, Entry, Headline, Table
from planner.report.units import attributes, breakdown, memory_table, mib, to_builtins


def worst_batch_document(
    estimate: Estimate,
    explanation: Explanation,
    limits: DisplayLimits,
    import_seconds: float,
    plan: VaryingPlan,
    sequence: int,
    sampled: SampledRun,
) -> Document:
    """Return the report of `planner explain` if the samples vary in size."""
    failure = sampled.replay.failure
    reason = "allocates most" if failure is None else f"runs out of memory in {place_text(failure)}"
    worst = Entry(
        "Worst batch",
        f"{shape_text(sampled.worst)}, in step {sampled.worst_step} of sequence {sequence}, which {reason}",
    )
    peak = Entry("Peak of it alone", peak_text(explanation))
    closing: list[Block] = closing_section(estimate, estimate.seconds, import_seconds)
    return Document.of(
        [Headline((*verdict(plan), job_entry(plan.job), worst, peak), style(plan))],
        [sides_table(plan)],
        [_added_table(explanation, sampled)],
        *breakdown_sections(breakdown(estimate), explanation, limits),
        [fragmentation_table(explanation)],
        [Bullets("Sampled", tuple(sampling_assumptions(plan)))],
        closing,
    )


def _added_table(explanation: Explanation, sampled: SampledRun) -> Table:
    """Return a table that compares a run's peaks with the peaks of its worst batch alone."""
    alone, run = explanation.run, sampled.replay
    before = f"after the {sampled.worst_step - 1:,} steps before it, of other sizes"
    rows = [
        ("allocated, that batch alone", alone.peak_allocated_bytes, "three steps of this size only"),
        ("reserved, that batch alone", alone.peak_reserved_bytes, ""),
        ("allocated in the run", run.peak_allocated_bytes, "on top of what the previous batch leaves"),
        ("reserved in the run", run.peak_reserved_bytes, f"over {sampled.steps:,} steps"),
        ("added by other sizes", added_bytes(explanation, sampled), before),
    ]
    return memory_table("What fragments add", rows)


def added_bytes(explanation: Explanation, sampled: SampledRun) -> int:
    """Return the reserved peak of the run minus the reserved peak of its worst batch alone."""
    return sampled.replay.peak_reserved_bytes - explanation.run.peak_reserved_bytes


def worst_batch_to_json(
    estimate: Estimate,
    explanation: Explanation,
    limits: DisplayLimits,
    import_seconds: float,
    plan: VaryingPlan,
    sequence: int,
    sampled: SampledRun,
) -> dict[str, Any]:
    """Return the JSON object of `planner explain` if the samples vary in size.

    It explains the worst batch, and has the plan of the sampled runs.
    """
    return {
        **explanation_to_json(estimate, explanation, None, limits, import_seconds),
        "worst": {
            "sequence": sequence,
            "step": sampled.worst_step,
            "shape": to_builtins(sampled.worst),
            **attributes(sampled.replay, "peak_allocated_mib", "peak_reserved_mib"),
            "added_by_other_sizes_mib": mib(added_bytes(explanation, sampled)),
        },
        "sampled": varying_to_json(plan, import_seconds),
    }
