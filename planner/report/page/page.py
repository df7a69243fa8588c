"""Write a self-contained HTML page that shows where the memory goes.

It needs plotly and Jinja. The page contains its data as JSON, in whole bytes except for the figures, whose
levels are MiB.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from planner._support.atomic_write import save
from planner.allocator import max_reserved_bytes
from planner.hardware import process_bytes
from planner.planning import BatchCurve, DeviceCurve, DisplayLimits, Explanation
from planner.program import Outcome, Trace
from planner.report.commands.estimates.tables import parts_table
from planner.report.commands.explain.summary import Summary
from planner.report.commands.explain.tables import (
    fragmentation_table,
    levels_table,
    tensor_text,
    tensors_title,
)
from planner.report.commands.explain.workspaces import parts_text, workspaces_title
from planner.report.describe import place_text, short_op
from planner.report.document import Cell, Column, Table
from planner.report.page.figures import breakdown_figure, curve_figure, modules_figure, timeline_figure
from planner.report.units import SCHEMA, is_endless, mib_text

ASSETS = Path(__file__).with_name("assets")
VERDICTS = {
    Outcome.FITS: "✓ fits",
    Outcome.FITS_WITH_RETRIES: "△ fits, with retries",
    Outcome.DOES_NOT_FIT: "✗ does not fit",
}
_COLUMNS = {  # columns of a curve, by the attribute of its points
    **{"batch": "batch", "outcome": "outcome", "allocated": "peak_allocated_bytes"},
    **{"reserved": "peak_reserved_bytes", "process": "process_bytes", "process_upper": "process_upper_bytes"},
}
_GROUPS = {"": "Chosen", "consumer": "Consumer", "workstation": "Workstation", "datacenter": "Datacenter"}


def save_page(
    summary: Summary,
    explanation: Explanation,
    trace: Trace,
    limits: DisplayLimits,
    curve: BatchCurve | None,
    path: Path,
) -> None:
    """Write the HTML page of an explained run to a file.

    The page shows a single batch if `curve` is None. Raises DataFileError.
    """
    save(path, page_html(summary, explanation, trace, limits, curve).encode(), "the page")


def page_html(
    summary: Summary, explanation: Explanation, trace: Trace, limits: DisplayLimits, curve: BatchCurve | None
) -> str:
    """Return the HTML page of an explained run."""
    loader = FileSystemLoader(ASSETS)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cells"] = _cells
    return environment.get_template("page.html.jinja").render(
        summary=summary,
        outcome=summary.outcome.value if summary.outcome is not None else "",
        peak=f"The allocated peak is reached in {place_text(explanation.peak)}.",
        parts=parts_table(summary.parts),
        cards=[] if curve is None else _choices(curve),
        chosen=None if curve is None else curve.chosen,
        batch=explanation.run.batch,
        tensors_title=tensors_title(explanation),
        tensors=_tensors(explanation, limits.top),
        workspaces_title=workspaces_title(explanation),
        workspaces=_workspaces(explanation, limits.top),
        levels=levels_table(explanation),
        gaps=fragmentation_table(explanation),
        css=Markup((ASSETS / "page.css").read_text(encoding="utf-8")),
        js=Markup((ASSETS / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        data=_embedded(page_data(summary, explanation, trace, curve)),
    )


def _embedded(data: dict[str, Any]) -> Markup:
    """Return the data as JSON that is safe inside the page's script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# ---- tables


def _cells(table: Table) -> Iterator[list[tuple[Column, Cell, str]]]:
    """Yield each row as a list of (column, cell, colour), without the bar columns.

    The colour is that of the row's bar for the first cell, and empty for all others.
    """
    for cells in table.cells():
        colour = "".join(cell.colour for cell in cells if cell.share is not None)
        pairs = zip(table.columns, cells, strict=True)
        shown = [(column, cell) for column, cell in pairs if not column.is_bar]
        yield [(column, cell, "" if at else colour) for at, (column, cell) in enumerate(shown)]


def _tensors(explanation: Explanation, top: int) -> Table:
    """Return a table of the `top` largest blocks. It has more columns than the table for terminals."""
    titles = ("category", "tensor", "operator and module", "source")
    rows = [
        (
            mib_text(block.size_bytes),
            block.category.value,
            tensor_text(block),
            Cell(short_op(block.op), detail=block.module),
            "" if block.detail is None else Cell(block.detail.source, detail=block.detail.code),
        )
        for block in explanation.blocks[:top]
    ]
    return Table([Column("MiB", is_number=True), *map(Column, titles)], rows)


def _workspaces(explanation: Explanation, top: int) -> Table:
    titles = ("direction and module", "engine", "consists of, MiB")
    rows = [
        (
            mib_text(one.size_bytes),
            Cell(f"{one.direction}{', while engines are timed' if one.searched else ''}", detail=one.module),
            "" if one.engine is None else f"{one.engine} {one.notes}",
            parts_text(one),
        )
        for one in explanation.workspaces[:top]
    ]
    return Table([Column("MiB", is_number=True), *map(Column, titles)], rows)


def _choices(curve: BatchCurve) -> list[tuple[str, list[tuple[int, str]]]]:
    """Return the curve's GPUs grouped by product line, in a fixed order.

    Each group is (product line, GPUs), and each GPU is (index in the curve, name).
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for number, one in enumerate(curve.curves):
        device = one.budget.device
        line = "" if device.about is None else device.about.line.value
        name = "No GPU" if one.max_batch is None else device.name
        groups.setdefault(_GROUPS.get(line, "MIG slices"), []).append((number, name))
    order = [*_GROUPS.values(), "MIG slices"]
    return sorted(groups.items(), key=lambda group: order.index(group[0]))


# ---- data for the page's script


def page_data(
    summary: Summary, explanation: Explanation, trace: Trace, curve: BatchCurve | None
) -> dict[str, Any]:
    """Return the sizes, verdict texts, figures and batch curve that the page's script reads.

    Sizes outside of the figures are in bytes.
    """
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
        else {"chosen": curve.chosen, "cards": [_curve_data(one) for one in curve.curves]},
    }


def _curve_data(curve: DeviceCurve) -> dict[str, Any]:
    """Return a GPU's name, limits, largest batch and curve as data for the page's script.

    Sizes are in bytes; an unlimited size is None.
    """
    budget = curve.budget
    limit_bytes = max_reserved_bytes(budget.limits)
    return {
        "name": budget.device.name,
        "about": _about(curve),
        "usable": None if is_endless(budget.device.usable) else budget.device.usable.value,
        "limit": None if limit_bytes is None else process_bytes(budget, limit_bytes),
        "max_batch": curve.max_batch,
        **{key: [getattr(point, name) for point in curve.points] for key, name in _COLUMNS.items()},
    }


def _about(curve: DeviceCurve) -> str:
    """Return a sentence on a GPU's memory and calibration, or a hint to choose one if none is selected."""
    budget, device = curve.budget, curve.budget.device
    if is_endless(device.usable):
        return "No GPU is selected: choose one above."
    correction = budget.correction
    sure = "not calibrated for this job: margins of published runs"
    if correction is not None and correction.fit is not None:
        sure = f"calibrated ({correction.level}: {correction.about})"
    total, usable = mib_text(device.total.value), mib_text(device.usable.value)
    sizes = f"total {total} MiB, of which torch sees {usable} MiB"
    return f"{device.name}: {sizes} ({device.usable.kind.value}); {sure}."
