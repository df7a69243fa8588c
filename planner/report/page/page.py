"""One page that shows where the memory goes: self-contained, so that it opens anywhere; needs plotly, Jinja.

The page's data stand in it as JSON, in whole bytes but for the figures, whose levels are MiB.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from planner._support.atomic_write import save
from planner.allocator import room_bytes
from planner.hardware import process_bytes
from planner.hardware.cudnn import LayerWorkspace
from planner.planning import BatchCurve, CardCurve, Explanation, LiveBlock, Shown
from planner.program import Outcome, Trace
from planner.report.assumptions import short_op
from planner.report.commands.as_json import SCHEMA
from planner.report.commands.explain import moment_text, tensor_text
from planner.report.commands.explain_workspaces import parts_text, workspaces_title
from planner.report.layout import DIGITS
from planner.report.page.figures import breakdown_figure, curve_figure, timeline_figure
from planner.report.page.modules_figure import modules_figure
from planner.report.plots.colours import PART_COLOURS
from planner.report.summary import Summary
from planner.report.units import is_endless, mib, shares

ASSETS = Path(__file__).with_name("assets")
VERDICTS = {
    Outcome.FITS: "✓ fits",
    Outcome.FITS_WITH_RETRIES: "△ fits, with retries",
    Outcome.DOES_NOT_FIT: "✗ does not fit",
}
_GROUPS = {"": "Chosen", "consumer": "Consumer", "workstation": "Workstation", "datacenter": "Datacenter"}


def save_page(
    summary: Summary,
    explanation: Explanation,
    trace: Trace,
    shown: Shown,
    curve: BatchCurve | None,
    path: Path,
) -> None:
    """Write the page; without a curve, one of this batch alone. Raises DataFileError."""
    save(path, page_html(summary, explanation, trace, shown, curve).encode(), "the page")


def page_html(
    summary: Summary, explanation: Explanation, trace: Trace, shown: Shown, curve: BatchCurve | None
) -> str:
    """The page as HTML."""
    loader = FileSystemLoader(ASSETS)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    said = page_data(summary, explanation, trace, curve)
    return environment.get_template("page.html.jinja").render(
        title=summary.title,
        job=summary.about,
        outcome=summary.outcome.value if summary.outcome is not None else "",
        verdict=summary.verdict,
        fails=summary.failure,
        tiles=summary.tiles,
        peak=f"The allocated peak is reached in {moment_text(explanation.peak)}.",
        parts=list(_parts(summary)),
        cards=[] if curve is None else _choices(curve),
        chosen=None if curve is None else curve.chosen,
        batch=explanation.run.batch,
        blocks=f"{len(explanation.blocks):,}",
        tensors=[_tensor(block) for block in explanation.blocks[: shown.top]],
        has_tensors=any(block.detail is not None and block.detail.dtype for block in explanation.blocks),
        workspaces=[_workspace(one) for one in explanation.workspaces[: shown.top]],
        workspaces_title=workspaces_title(explanation),
        sureness=summary.sureness,
        levels=list(_levels(explanation)),
        gaps=list(_gaps(explanation)),
        assumed=summary.assumptions,
        css=Markup((ASSETS / "page.css").read_text(encoding="utf-8")),
        js=Markup((ASSETS / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        data=_embedded(said),
    )


def _embedded(said: dict[str, Any]) -> Markup:
    """JSON that no text in it can end before its time."""
    text = json.dumps(said, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# ---- what the page's script reads


def page_data(
    summary: Summary, explanation: Explanation, trace: Trace, curve: BatchCurve | None
) -> dict[str, Any]:
    """The data in the page."""
    run = explanation.run
    figures = {
        "breakdown": breakdown_figure(summary.parts),
        "timeline": timeline_figure(explanation, trace),
        "modules": modules_figure(explanation, summary.name),
    }
    if curve is not None:
        figures["curve"] = curve_figure(curve)
    return {
        "schema": SCHEMA,
        **summary.data,
        "peak_allocated_bytes": run.peak_allocated_bytes,
        "peak_reserved_bytes": run.peak_reserved_bytes,
        "process_bytes": summary.process_bytes,
        "categories": dict(summary.parts),
        "verdicts": {outcome.value: text for outcome, text in VERDICTS.items()},
        "figures": figures,
        "curve": None
        if curve is None
        else {"chosen": curve.chosen, "cards": [_card(card) for card in curve.cards]},
    }


def _card(card: CardCurve) -> dict[str, Any]:
    """One card and its points, column by column; levels in bytes, null where there is no end."""
    budget, points = card.budget, card.points
    room = room_bytes(budget.arena)
    return {
        "name": budget.device.name,
        "about": _about(card),
        "usable": None if is_endless(budget.device.usable) else budget.device.usable.value,
        "limit": None if room is None else process_bytes(budget, room),
        "max_batch": card.max_batch,
        "batch": [point.batch for point in points],
        "outcome": [point.outcome.value for point in points],
        "allocated": [point.peak_allocated_bytes for point in points],
        "reserved": [point.peak_reserved_bytes for point in points],
        "process": [point.process_bytes for point in points],
        "process_upper": [point.process_upper_bytes for point in points],
    }


def _about(card: CardCurve) -> str:
    """The card and how sure its figures are, in one sentence."""
    budget, device = card.budget, card.budget.device
    if is_endless(device.usable):
        return "No GPU was asked for: choose one above."
    correction = budget.correction
    sure = "not calibrated for this job: margins of published runs"
    if correction is not None and correction.fit is not None:
        sure = f"calibrated ({correction.level}: {correction.about})"
    sizes = f"total {_mib(device.total.value)} MiB, of which torch sees {_mib(device.usable.value)} MiB"
    return f"{device.name}: {sizes} ({device.usable.kind.value}); {sure}."


def _choices(curve: BatchCurve) -> list[tuple[str, list[tuple[int, str]]]]:
    """The cards by line, each with its number and a name with its largest batch."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for number, card in enumerate(curve.cards):
        device = card.budget.device
        line = "" if device.about is None else device.about.line.value
        name = "No GPU" if card.max_batch is None else device.name
        groups.setdefault(_GROUPS.get(line, "MIG slices"), []).append((number, name))
    order = [*_GROUPS.values(), "MIG slices"]
    return sorted(groups.items(), key=lambda group: order.index(group[0]))


# ---- what the tables say


def _mib(size_bytes: int) -> str:
    return f"{mib(size_bytes, DIGITS):,.1f}"


def _parts(summary: Summary) -> Iterator[dict[str, str]]:
    for name, rounded, share in shares(summary.parts, DIGITS):
        yield {"name": name, "mib": f"{rounded:,.1f}", "share": f"{share:.1%}", "colour": PART_COLOURS[name]}


def _tensor(block: LiveBlock) -> dict[str, str]:
    detail = block.detail
    return {
        "mib": _mib(block.size_bytes),
        "category": block.role.value,
        "tensor": tensor_text(detail.shape, detail.dtype) if detail is not None and detail.dtype else "",
        "op": short_op(block.op),
        "module": block.module,
        "source": "" if detail is None else detail.source,
        "code": "" if detail is None else detail.code,
    }


def _workspace(one: LayerWorkspace) -> dict[str, str]:
    engine = "" if one.engine is None else f"{one.engine} {one.notes}"
    timed = ", while engines are timed" if one.searched else ""
    return {
        "mib": _mib(one.size_bytes),
        "direction": f"{one.direction}{timed}",
        "module": one.module,
        "engine": engine,
        "parts": parts_text(one),
    }


def _levels(explanation: Explanation) -> Iterator[dict[str, Any]]:
    """Peaks by step, by phase of the step that has the peak, and of evaluation alone."""
    for step in explanation.steps:
        figures = step.allocated_bytes, step.reserved_bytes, step.end_allocated_bytes
        name = "set-up" if step.step == 0 else f"step {step.step}"
        yield {"name": name, "inner": False, "figures": list(map(_mib, figures))}
        for phase in explanation.phases:
            if phase.step == step.step == explanation.peak.step > 0:
                figures = phase.allocated_bytes, phase.reserved_bytes, phase.end_allocated_bytes
                yield {"name": phase.phase.value, "inner": True, "figures": list(map(_mib, figures))}
    run = explanation.evaluation
    if run is not None:
        figures = run.peak_allocated_bytes, run.peak_reserved_bytes, run.end_allocated_bytes
        yield {"name": "evaluation alone", "inner": False, "figures": list(map(_mib, figures))}


def _gaps(explanation: Explanation) -> Iterator[tuple[str, str, str]]:
    found = explanation.fragmentation
    yield "reserved", _mib(found.reserved_bytes), moment_text(found.moment)
    rounding = f"{_mib(found.rounding_bytes)} of it by rounding up"
    yield "allocated then", _mib(found.allocated_bytes), rounding
    yield "gaps", _mib(found.gap_bytes), "free memory between blocks in use"
    yield "free segments", _mib(found.free_segment_bytes), "given back to CUDA where memory is short"
