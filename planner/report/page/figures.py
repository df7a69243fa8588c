"""Draw the figures of the HTML page with plotly.

They are the timeline, the breakdown, the batch curve and the modules. Levels are MiB as floats, which are
exact: bytes are whole and far below 2**53. A trace whose `meta` has `ink` is drawn in the text colour of the
page, which the page's script knows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plotly import graph_objects as go

from planner.allocator import Timeline, thin
from planner.hardware import MIB
from planner.planning import BatchCurve, Explanation
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart, Trace
from planner.report.describe import short_op
from planner.report.plots.colours import CATEGORY_COLOURS, PART_COLOURS

MOST_POINTS = 2000  # about the most points that a page of this width can separate
_LETTER = 0.0085  # a letter's share of the figure's width: a phase narrower than its name is not labelled
_GPU_COLOUR = "#D55E00"

Figure = dict[str, Any]  # `data` and `layout`, as Plotly.newPlot takes them


def make_figure(traces: list[Any], **layout: Any) -> Figure:
    """Return a figure of the plotly traces `traces` as a dict, checked by plotly.

    Raises ValueError for a property that plotly does not know.
    """
    figure = go.Figure(traces)
    margin = {"l": 76, "r": 16, "t": 16, "b": 44}
    clear = "rgba(0,0,0,0)"
    figure.update_layout(template="none", margin=margin, paper_bgcolor=clear, plot_bgcolor=clear)
    figure.update_layout(**layout)
    drawn: Figure = figure.to_plotly_json()
    return drawn


_HOVER = "%{y:,.1f} MiB"
_CURVES = {  # the layout of levels over events or batch sizes
    "height": 480,
    "hovermode": "x unified",
    "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "xanchor": "left"},
    "yaxis": {"title": {"text": "MiB", "standoff": 12}, "tickformat": ",d", "rangemode": "tozero"},
}


def _axis(title: str, name: str) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 8}, "unifiedhovertitle": {"text": f"{name} %{{x}}"}}


# ---- the timeline


def timeline_figure(explanation: Explanation, trace: Trace) -> Figure:
    """Return a figure of allocated memory by category, and of reserved memory, over the trace's events.

    About `MOST_POINTS` events are drawn if the trace has more.
    """
    timeline = explanation.timeline
    points = thin(timeline, MOST_POINTS)
    allocations = allocations_of(trace)
    texts = [_happening(trace, allocations, index) for index in points]
    traces: list[Any] = []
    for category, colour in CATEGORY_COLOURS.items():
        if max(timeline.by_category[category]):
            levels, line = timeline.by_category[category], {"width": 0, "shape": "hv", "color": colour}
            fill = {"stackgroup": "categories", "fillcolor": colour}
            traces.append(_line(category.value, points, [levels[i] for i in points], line, **fill))
    reserved, line = [timeline.reserved_bytes[i] for i in points], {"width": 1.8, "shape": "hv"}
    hover = {"text": texts, "hovertemplate": f"{_HOVER}<br>%{{text}}", "meta": {"ink": True}}
    traces.append(_line("reserved", points, reserved, line, **hover))
    event = explanation.peak.event
    peak, marker = timeline.allocated_bytes[event], {"symbol": "triangle-down", "size": 11}
    drawn = {"mode": "markers", "marker": marker, "hovertemplate": _HOVER, "meta": {"ink": True}}
    traces.append(go.Scatter(x=[event], y=[peak / MIB], name="peak allocated", **drawn))
    shapes, names = _phases(timeline)
    axis = _axis("allocations and frees, in order", "event")
    axis["range"] = [0, len(timeline.allocated_bytes) - 1]
    margin = {"l": 76, "r": 16, "t": 40, "b": 44}
    return make_figure(traces, **_CURVES, margin=margin, xaxis=axis, shapes=shapes, annotations=names)


def _line(name: str, x: list[int], y: list[int], line: Mapping[str, Any], **others: Any) -> Any:
    """Return a plotly line through the levels `y`, which are given in bytes and drawn in MiB."""
    others = {"hovertemplate": _HOVER, **others}
    return go.Scatter(x=x, y=[level / MIB for level in y], name=name, mode="lines", line=line, **others)


def allocations_of(trace: Trace) -> Mapping[int, Alloc]:
    """Return the allocation event of each block in a trace."""
    return {event.block: event for event in trace.events if isinstance(event, Alloc)}


def _happening(trace: Trace, allocations: Mapping[int, Alloc], index: int) -> str:
    """Return the hover text for the trace's event at `index`."""
    event: Event = trace.events[index]
    if isinstance(event, PhaseStart):
        return f"step {event.step}, {event.phase} begins"
    made = allocations[event.block] if isinstance(event, Free) else event
    site = trace.sites[made.site]
    where = f" in {site.module}" if site.module else ""
    freed = "free of " if isinstance(event, Free) else ""
    return escape_hover(f"{freed}{made.category} of {short_op(site.op)}{where}")


def escape_hover(text: str) -> str:
    """Return a text with "&", "<" and ">" escaped for a figure.

    Plotly interprets some HTML tags, and names such as `<lambda>` look like tags.
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _phases(timeline: Timeline) -> tuple[list[Any], list[Any]]:
    """Return plotly's vertical lines and labels for steps and phases.

    Lines are at the starts, and narrow phases have no label.
    """
    total = len(timeline.allocated_bytes)
    ends = [*(index for index, _ in timeline.marks), total][1:]
    shapes, names, before = [], [], 0
    for (start, mark), end in zip(timeline.marks, ends, strict=True):
        if mark.phase is Phase.END:
            continue
        new_step, before = mark.step > before, mark.step
        line = {"color": "#888888", "width": 1, "dash": "solid" if new_step else "dot"}
        place = {"type": "line", "x0": start, "x1": start, "yref": "paper", "y0": 0, "y1": 1}
        shapes.append({**place, "layer": "below", "line": line})
        if new_step:
            names.append(_name(start, f"<b>step {mark.step}</b>", 1.075, "left"))
        if mark.step > 0 and end - start > _LETTER * len(mark.phase) * total:
            names.append(_name((start + end) / 2, str(mark.phase), 1.03, "center"))
    return shapes, names


def _name(x: float, text: str, height: float, side: str) -> dict[str, Any]:
    place = {"x": x, "xanchor": side, "yref": "paper", "y": height, "yanchor": "middle"}
    return {**place, "text": text, "showarrow": False}


# ---- the breakdown of the process


def breakdown_figure(parts: Mapping[str, int]) -> Figure:
    """Return a figure of the process's memory: one bar, stacked by category."""
    bars = [
        go.Bar(
            x=[size_bytes / MIB],
            y=[""],
            name=name,
            orientation="h",
            marker={"color": PART_COLOURS[name]},
            hovertemplate=f"{name}: %{{x:,.1f}} MiB<extra></extra>",
        )
        for name, size_bytes in parts.items()
        if size_bytes
    ]
    return make_figure(
        bars,
        barmode="stack",
        height=104,
        showlegend=False,
        margin={"l": 8, "r": 16, "t": 4, "b": 44},
        xaxis={"title": "MiB", "tickformat": ",d"},
        yaxis={"visible": False},
    )


# ---- the batch curve


def curve_figure(curve: BatchCurve) -> Figure:
    """Return the figure of memory by batch size on the chosen GPU.

    The page's script draws the limits and the marker, and replaces the curves if another GPU is chosen.
    """
    chosen = curve.curves[curve.chosen]
    sure = f"{chosen.budget.confidence:g}"
    lines = (
        ("process_upper", f"process, at most ({sure} sure)", "process_upper_bytes", "dot", 1.2),
        ("process", "process, as nvidia-smi shows it", "process_bytes", "solid", 2.6),
        ("reserved", "reserved", "peak_reserved_bytes", "dash", 1.4),
        ("allocated", "allocated", "peak_allocated_bytes", "dashdot", 1.4),
    )
    x = [point.batch for point in chosen.points]
    traces: list[Any] = []
    for key, name, attribute, dash, width in lines:
        levels = [getattr(point, attribute) for point in chosen.points]
        traces.append(_line(name, x, levels, {"width": width, "dash": dash}, meta={"key": key, "ink": True}))
    limits = (("card", "the GPU's memory", "solid"), ("limit", f"room at confidence {sure}", "dash"))
    for key, name, dash in limits:
        line = {"color": _GPU_COLOUR, "width": 1.6, "dash": dash}
        traces.append(_line(name, [], [], line, meta={"key": key}))
    drawn = {"mode": "markers", "marker": {"size": 11, "line": {"width": 1}}, "hoverinfo": "skip"}
    traces.append(go.Scatter(x=[], y=[], name="this batch", **drawn, meta={"key": "marker"}))
    return make_figure(traces, **_CURVES, xaxis={**_axis("batch size", "batch"), "tickformat": ",d"})


# ---- the modules


@dataclass(slots=True)
class _Leaf:
    """The totals over the blocks of one category that one operator requested in one module."""

    size_bytes: int = 0
    blocks: int = 0
    largest: str = ""  # shape, type and source line of the largest block; empty if they are unknown


def modules_figure(explanation: Explanation, model: str) -> Figure:
    """Return an icicle chart of the memory of modules.

    Its leaves are operators' blocks, coloured by category. Rectangles of modules have no colour: the page's
    script gives them the colour of its panels.
    """
    rows = list(_module_rows(explanation, model))
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


def _module_rows(explanation: Explanation, model: str) -> Iterator[_Row]:
    pending = [explanation.modules]
    while pending:
        share = pending.pop()
        label = share.name.rpartition(".")[2] or model
        hover = f"<b>{escape_hover(share.name or model)}</b>"
        parent = _id(share.name.rpartition(".")[0]) if share.name else ""
        yield _id(share.name), parent, escape_hover(label), share.size_bytes, None, hover
        pending += share.children
    leaves: dict[tuple[str, str, Category], _Leaf] = {}
    for block in explanation.blocks:  # in descending order of size
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
