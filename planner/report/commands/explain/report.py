"""The report of `planner explain`, on what takes the memory of a batch.

In its JSON, sizes that must add up are whole bytes.
"""

from collections.abc import Mapping
from typing import Any

from planner.allocator.history import Difference
from planner.jobs import job_to_json
from planner.planning import DisplayLimits, Estimate, Explanation, fold
from planner.report.budget import planned_torch
from planner.report.commands.estimates.estimate import estimate_to_json
from planner.report.commands.estimates.tables import closing_section, parts_table
from planner.report.commands.estimates.verdict import headline
from planner.report.commands.explain.diff import difference_sections, difference_to_json
from planner.report.commands.explain.tables import (
    block_to_json,
    fragmentation_table,
    levels_table,
    modules_tables,
    peak_text,
    shown_depth,
    tensors_section,
)
from planner.report.commands.explain.workspaces import workspaces_section, workspaces_to_json
from planner.report.describe import job_entry
from planner.report.document import Block, Document, Entry
from planner.report.units import SCHEMA, attributes, breakdown, to_builtins


def explanation_document(
    estimate: Estimate,
    explanation: Explanation,
    difference: Difference | None,
    limits: DisplayLimits,
    import_seconds: float,
) -> Document:
    """Return the report of `planner explain`."""
    unlimited = ", on an unlimited GPU" if estimate.is_unlimited else ""
    peak = Entry("Peak allocated", f"{peak_text(explanation)}{unlimited}")
    return Document.of(
        [headline(estimate, job_entry(estimate.job), peak)],
        *breakdown_sections(breakdown(estimate), explanation, limits),
        workspaces_section(estimate, explanation, limits.top),
        [fragmentation_table(explanation)],
        [levels_table(explanation)],
        *([] if difference is None else difference_sections(difference, limits.top)),
        closing_section(estimate, estimate.seconds, import_seconds),
    )


def breakdown_sections(
    parts: Mapping[str, int], explanation: Explanation, limits: DisplayLimits
) -> list[list[Block]]:
    """Return sections that break down the process by category, and its peak by module and tensor."""
    return [
        [parts_table(parts)],
        [*modules_tables(explanation, limits.depth)],
        tensors_section(explanation, limits.top),
    ]


def explanation_to_json(
    estimate: Estimate,
    explanation: Explanation,
    difference: Difference | None,
    limits: DisplayLimits,
    import_seconds: float,
) -> dict[str, Any]:
    """Return the JSON object of `planner explain`.

    `categories` and `modules` each add up to `peak.allocated_bytes`; `modules` is as deep as in the text.
    `estimate` is the object of `planner estimate`. `tensors` has the `limits.top` largest tensors.
    `difference` is null without a recording.
    """
    evaluation, levels = explanation.evaluation, ("peak_allocated", "peak_reserved", "end_allocated")
    return {
        "schema": SCHEMA,
        "model": estimate.job.model.name,
        "torch": planned_torch(estimate.job),
        "batch": explanation.run.batch,
        "job": job_to_json(estimate.job),
        "estimate": estimate_to_json(estimate, import_seconds),
        **breakdown_to_json(explanation, limits),
        "workspaces": workspaces_to_json(estimate, explanation, limits.top),
        **attributes(explanation, "steps"),
        "evaluation": evaluation and attributes(evaluation, *(f"{name}_bytes" for name in levels)),
        "difference": None if difference is None else difference_to_json(difference, limits.top),
    }


def breakdown_to_json(explanation: Explanation, limits: DisplayLimits) -> dict[str, Any]:
    """Return the JSON entries that break down the memory of an explained run.

    `categories` and `modules` each add up to the allocated peak; `tensors` has the `limits.top` largest.
    """
    depth = shown_depth(explanation, limits.depth)
    peak_bytes, gaps = explanation.run.peak_allocated_bytes, to_builtins(explanation.fragmentation)
    return {
        "peak": to_builtins(explanation.peak) | {"allocated_bytes": peak_bytes},
        "categories": to_builtins(explanation.at_peak),
        "modules": to_builtins(fold(explanation.modules, depth)),
        "tensors": [block_to_json(block) for block in explanation.blocks[: limits.top]],
        "blocks": len(explanation.blocks),
        "fragmentation": gaps.pop("location") | gaps,
        **attributes(explanation, "phases"),
    }
