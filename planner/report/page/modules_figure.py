"""The modules of the page: an icicle down to operators; needs plotly."""

from collections.abc import Iterator
from dataclasses import dataclass

from plotly import graph_objects as go

from planner.hardware import MIB
from planner.planning import Explanation
from planner.program import Category
from planner.report.describe import short_op
from planner.report.page.figures import Figure, escape_hover, make_figure
from planner.report.plots.colours import CATEGORY_COLOURS


@dataclass(slots=True)
class _Leaf:
    """Blocks of one module that one operator asked for, in one category."""

    size_bytes: int = 0
    blocks: int = 0
    largest: str = ""  # shape and source line of the largest


def modules_figure(explanation: Explanation, model: str) -> Figure:
    """Return an icicle: modules beside those that hold them, at the end what their operators asked for,
    coloured by category. Fields of modules have no colour: the page's script gives them that of its panels.
    """
    rows = list(_rows(explanation, model))
    node = go.Icicle(
        ids=[row[0] for row in rows],
        parents=[row[1] for row in rows],
        labels=[row[2] for row in rows],
        values=[row[3] / MIB for row in rows],
        customdata=[row[5] for row in rows],
        branchvalues="total",
        marker={"colors": [row[4] for row in rows], "line": {"width": 0.5}},
        texttemplate="%{label}  %{value:,.1f}",
        hovertemplate="%{customdata}<br>%{value:,.1f} MiB, %{percentRoot:.1%} of all<extra></extra>",
        pathbar={"visible": True, "thickness": 24},
        tiling={"orientation": "h"},
        leaf={"opacity": 1},
    )
    margin = {"l": 0, "r": 0, "t": 28, "b": 0}
    return make_figure([node], height=680, margin=margin, uniformtext={"mode": "hide", "minsize": 9})


_Row = tuple[str, str, str, int, str | None, str]  # id, parent, label, bytes, colour, hover


def _rows(explanation: Explanation, model: str) -> Iterator[_Row]:
    pending = [explanation.modules]
    while pending:
        share = pending.pop()
        label = share.name.rpartition(".")[2] or model
        known = f"<b>{escape_hover(share.name or model)}</b>"
        parent = _id(share.name.rpartition(".")[0]) if share.name else ""
        yield _id(share.name), parent, escape_hover(label), share.size_bytes, None, known
        pending += share.children
    leaves: dict[tuple[str, str, Category], _Leaf] = {}
    for block in explanation.blocks:  # by falling size
        leaf = leaves.setdefault((block.module, block.op, block.category), _Leaf())
        leaf.size_bytes += block.size_bytes
        leaf.blocks += 1
        if not leaf.largest and block.detail is not None:
            shape = "x".join(map(str, block.detail.shape))
            held = f"{shape or 'scalar'} {block.detail.dtype}" if block.detail.dtype else ""
            leaf.largest = "<br>".join(escape_hover(part) for part in (held, block.detail.source) if part)
    for (module, op, category), leaf in leaves.items():
        count = f"{leaf.blocks} block{'s' * (leaf.blocks > 1)}"
        where = escape_hover(module or "outside of modules")
        hover = f"<b>{where}</b><br>{category} of {escape_hover(short_op(op))}, {count}"
        hover += f"<br>{leaf.largest}" if leaf.largest else ""
        own = f"{_id(module)} {op} {category}"
        yield own, _id(module), escape_hover(short_op(op)), leaf.size_bytes, CATEGORY_COLOURS[category], hover


def _id(module: str) -> str:
    return f"/{module}"
