"""The JSON object of `planner explain`; sizes that add up are whole bytes, so that they do so exactly."""

from dataclasses import asdict
from typing import Any

from planner.allocator import PhasePeak, Replay
from planner.allocator.history import Difference, SidePeak
from planner.jobs import job_to_json
from planner.planning import Estimate, Explanation, LiveBlock, ModuleShare, Moment, Shown, fold
from planner.program import Category
from planner.report.commands.as_json import SCHEMA, estimate_to_json
from planner.report.commands.explain import readable_depth
from planner.report.commands.explain_diff import group_extras
from planner.report.commands.explain_workspaces import workspaces_to_json


def explanation_to_json(
    estimate: Estimate,
    explanation: Explanation,
    difference: Difference | None,
    shown: Shown,
    import_seconds: float,
) -> dict[str, Any]:
    """`categories`, `modules` and all blocks add up to `peak.allocated_bytes`.

    `estimate` is the object of `planner estimate`. `tensors` are the `shown.top` largest, `modules` is cut
    at the depth of the text. `difference` is null without a recording.
    """
    return {
        "schema": SCHEMA,
        "model": estimate.job.model,
        "batch": explanation.run.batch,
        "job": job_to_json(estimate.job),
        "estimate": estimate_to_json(estimate, import_seconds),
        **breakdown_to_json(explanation, shown),
        "workspaces": workspaces_to_json(estimate, explanation, shown.top),
        "steps": [asdict(step) for step in explanation.steps],
        "evaluation": None if explanation.evaluation is None else _run(explanation.evaluation),
        "difference": None if difference is None else _difference(difference, shown.top),
    }


def breakdown_to_json(explanation: Explanation, shown: Shown) -> dict[str, Any]:
    """Return the keys that any explained run has; `categories` and the like add up to the allocated peak."""
    run, found = explanation.run, explanation.fragmentation
    return {
        "peak": {**_moment(explanation.peak), "allocated_bytes": run.peak_allocated_bytes},
        "categories": _roles(explanation.at_peak),
        "modules": _module(fold(explanation.modules, shown.depth or readable_depth(explanation.modules))),
        "tensors": [_tensor(block) for block in explanation.blocks[: shown.top]],
        "blocks": len(explanation.blocks),
        "fragmentation": {
            **_moment(found.moment),
            "reserved_bytes": found.reserved_bytes,
            "allocated_bytes": found.allocated_bytes,
            "gap_bytes": found.gap_bytes,
            "free_segment_bytes": found.free_segment_bytes,
            "rounding_bytes": found.rounding_bytes,
            "largest_gaps": [asdict(gap) for gap in found.largest_gaps],
        },
        "phases": [_phase(phase) for phase in explanation.phases],
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "event": moment.event,
        "step": moment.step,
        "phase": moment.phase.value,
        "module": moment.module,
        "op": moment.op,
    }


def _roles(by_role: Any) -> dict[str, int]:
    return {role.value: by_role[role] for role in Category}


def _module(share: ModuleShare) -> dict[str, Any]:
    return {
        "name": share.name,
        "size_bytes": share.size_bytes,
        "own_bytes": share.own_bytes,
        "by_category": _roles(share.by_role),
        "children": [_module(child) for child in share.children],
    }


def _tensor(block: LiveBlock) -> dict[str, Any]:
    """Shape, dtype, source and code are null where they are not known, as in a trace saved by `estimate`."""
    detail = block.detail
    holds = detail is not None and detail.dtype
    return {
        "size_bytes": block.size_bytes,
        "requested_bytes": block.requested_bytes,
        "category": block.role.value,
        "module": block.module,
        "op": block.op,
        "step": block.step,
        "phase": block.phase.value,
        "shape": list(detail.shape) if detail is not None and holds else None,
        "dtype": detail.dtype if detail is not None and holds else None,
        "source": (detail.source or None) if detail is not None else None,
        "code": (detail.code or None) if detail is not None else None,
    }


def _phase(phase: PhasePeak) -> dict[str, Any]:
    return {**asdict(phase), "phase": phase.phase.value}


def _run(run: Replay) -> dict[str, int]:
    return {
        "peak_allocated_bytes": run.peak_allocated_bytes,
        "peak_reserved_bytes": run.peak_reserved_bytes,
        "end_allocated_bytes": run.end_allocated_bytes,
    }


def _difference(difference: Difference, top: int) -> dict[str, Any]:
    """The `top` largest groups; `ops` has every operator."""
    groups = group_extras(difference)
    lives = sorted(difference.lives, key=lambda life: -life.size_bytes)
    return {
        "about": difference.about,
        "notes": list(difference.notes),
        "same": difference.is_empty,
        "traced": _side(difference.traced_births, difference.traced),
        "recorded": _side(difference.recorded_births, difference.recorded),
        "matched": difference.matched,
        "stretches": difference.phases,
        "only_one_side": [
            {
                **asdict(group),
                "kind": group.kind.value,
                "phase": group.phase.value,
                "steps": list(group.steps),
            }
            for group in groups[:top]
        ],
        "groups": len(groups),
        "ops": [asdict(row) for row in difference.ops],
        "other_lives": [{**asdict(life), "phase": life.phase.value} for life in lives[:top]],
        "other_lives_in_all": len(difference.lives),
    }


def _side(births: int, peak: SidePeak) -> dict[str, int]:
    return {"blocks": births, **{f"peak_{name}": value for name, value in asdict(peak).items()}}
