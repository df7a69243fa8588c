"""The figures of the page: timeline, breakdown, batch curve; needs plotly. Modules: `page_modules`.

Levels are MiB as floats, which are exact: bytes are whole and far below 2**53. A trace whose `meta` has `ink`
is drawn in the colour of the page's text, which the page's script knows.
"""

from collections.abc import Mapping
from typing import Any

from plotly import graph_objects as go

from planner.allocator import Timeline, thin
from planner.hardware import MIB
from planner.planning import BatchCurve, CardCurve, Explanation
from planner.program import Alloc, Event, Free, Phase, PhaseStart, Trace
from planner.report.describe import short_op
from planner.report.plots.colours import CATEGORY_COLOURS, PART_COLOURS

MOST_POINTS = 2000  # that a page of this width can tell apart
_LETTER = 0.0085  # of the width: a phase with less room than its name needs is left without it
_CARD_COLOUR = "#D55E00"

Figure = dict[str, Any]  # `data` and `layout`, as Plotly.newPlot takes them


def make_figure(traces: list[Any], **layout: Any) -> Figure:
    """Checked by plotly: a property that it does not know raises ValueError."""
    figure = go.Figure(traces)
    margin = {"l": 76, "r": 16, "t": 16, "b": 44}
    clear = "rgba(0,0,0,0)"
    figure.update_layout(template="none", margin=margin, paper_bgcolor=clear, plot_bgcolor=clear)
    figure.update_layout(**layout)
    drawn: Figure = figure.to_plotly_json()
    return drawn


_LEVELS = {"title": {"text": "MiB", "standoff": 12}, "tickformat": ",d", "rangemode": "tozero"}


def _legend() -> Mapping[str, Any]:
    return {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "xanchor": "left"}


# ---- the timeline


def timeline_figure(explanation: Explanation, trace: Trace) -> Figure:
    """Categories stacked under the line of what is reserved, event by event."""
    timeline = explanation.timeline
    points = thin(timeline, MOST_POINTS)
    births = births_of(trace)
    told = [_happening(trace, births, index) for index in points]
    traces: list[Any] = [
        go.Scatter(
            x=points,
            y=[timeline.by_role[role][i] / MIB for i in points],
            name=role.value,
            stackgroup="categories",
            mode="lines",
            line={"width": 0, "shape": "hv", "color": colour},
            fillcolor=colour,
            hovertemplate="%{y:,.1f} MiB",
        )
        for role, colour in CATEGORY_COLOURS.items()
        if max(timeline.by_role[role])
    ]
    traces.append(_line("reserved", points, [timeline.reserved_bytes[i] / MIB for i in points], told))
    peak = [explanation.peak.event], [timeline.allocated_bytes[explanation.peak.event] / MIB]
    traces.append(
        go.Scatter(
            x=peak[0],
            y=peak[1],
            name="peak allocated",
            mode="markers",
            marker={"symbol": "triangle-down", "size": 11},
            hovertemplate="%{y:,.1f} MiB",
            meta={"ink": True},
        )
    )
    shapes, names = _phases(timeline)
    return make_figure(
        traces,
        height=480,
        margin={"l": 76, "r": 16, "t": 40, "b": 44},
        hovermode="x unified",
        legend=_legend(),
        xaxis={
            "title": {"text": "allocations and frees, in order", "standoff": 8},
            "unifiedhovertitle": {"text": "event %{x}"},
            "range": [0, len(timeline.allocated_bytes) - 1],
        },
        yaxis=_LEVELS,
        shapes=shapes,
        annotations=names,
    )


def _line(name: str, x: list[int], y: list[float], told: list[str]) -> Any:
    return go.Scatter(
        x=x,
        y=y,
        text=told,
        name=name,
        mode="lines",
        line={"width": 1.8, "shape": "hv"},
        hovertemplate="%{y:,.1f} MiB<br>%{text}",
        meta={"ink": True},
    )


def births_of(trace: Trace) -> Mapping[int, Alloc]:
    """The birth of each block."""
    return {event.block: event for event in trace.events if isinstance(event, Alloc)}


def _happening(trace: Trace, births: Mapping[int, Alloc], index: int) -> str:
    """What an event does, in words for a hover."""
    event: Event = trace.events[index]
    if isinstance(event, PhaseStart):
        return f"step {event.step}, {event.phase} begins"
    born = births[event.block] if isinstance(event, Free) else event
    site = trace.sites[born.site]
    where = f" in {site.module}" if site.module else ""
    freed = "free of " if isinstance(event, Free) else ""
    return escape_hover(f"{freed}{born.role} of {short_op(site.op)}{where}")


def escape_hover(text: str) -> str:
    """Plotly's texts know a few HTML tags; a name such as `<lambda>` is none."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _phases(timeline: Timeline) -> tuple[list[Any], list[Any]]:
    """A line where each step begins and a fainter one for its phases, with the names of the wider ones."""
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
    """Return one bar: the process by category."""
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
    """Memory against batch size on the chosen card; the page's script puts other cards' figures into it."""
    card = curve.cards[curve.chosen]
    x = [point.batch for point in card.points]
    sure = f"{card.budget.confidence:g}"
    lines: list[tuple[str, str, list[int], str, float]] = [
        (
            "process_upper",
            f"process, at most ({sure} sure)",
            _column(card, "process_upper_bytes"),
            "dot",
            1.2,
        ),
        ("process", "process, as nvidia-smi shows it", _column(card, "process_bytes"), "solid", 2.6),
        ("reserved", "reserved", _column(card, "peak_reserved_bytes"), "dash", 1.4),
        ("allocated", "allocated", _column(card, "peak_allocated_bytes"), "dashdot", 1.4),
    ]
    traces: list[Any] = [
        go.Scatter(
            x=x,
            y=[level / MIB for level in levels],
            name=name,
            mode="lines",
            line={"width": width, "dash": dash},
            hovertemplate="%{y:,.1f} MiB",
            meta={"key": key, "ink": True},
        )
        for key, name, levels, dash, width in lines
    ]
    traces += [
        _across("card", "the GPU's memory", "solid"),
        _across("limit", f"room at confidence {sure}", "dash"),
    ]
    traces.append(_marker())
    return make_figure(
        traces,
        height=480,
        hovermode="x unified",
        legend=_legend(),
        xaxis={
            "title": {"text": "batch size", "standoff": 8},
            "tickformat": ",d",
            "unifiedhovertitle": {"text": "batch %{x}"},
        },
        yaxis=_LEVELS,
    )


def _column(card: CardCurve, name: str) -> list[int]:
    return [getattr(point, name) for point in card.points]


def _across(key: str, name: str, dash: str) -> Any:
    return go.Scatter(
        x=[],
        y=[],
        name=name,
        mode="lines",
        line={"color": _CARD_COLOUR, "width": 1.6, "dash": dash},
        hovertemplate="%{y:,.1f} MiB",
        meta={"key": key},
    )


def _marker() -> Any:
    return go.Scatter(
        x=[],
        y=[],
        name="this batch",
        mode="markers",
        marker={"size": 11, "line": {"width": 1}},
        hoverinfo="skip",
        meta={"key": "marker"},
    )
