"""Draw a run's allocated memory by category and its reserved memory over its events, with matplotlib."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from planner.allocator import Timeline, thin
from planner.planning import Explanation
from planner.program import Phase
from planner.report.plots._axes import GIB, label_axes, make_axes, save_picture
from planner.report.plots.colours import CATEGORY_COLOURS

_MOST_POINTS = 2000  # about the most points that a picture of this width can separate
_LETTER = 0.0108  # a letter's share of the picture's width: a phase narrower than its name is not labelled


def draw_timeline(explanation: Explanation, caption: str, path: Path) -> None:
    """Save a picture of a run's allocated memory by category, and its reserved memory, over its events.

    Raises DataFileError.
    """
    axes = make_axes(4.6)
    _levels(axes, explanation.timeline)
    _phases(axes, explanation.timeline)
    _peak(axes, explanation)
    _legend(axes)
    label_axes(axes, caption, "allocations and frees, in order", "GiB")
    save_picture(axes, path)


def _levels(axes: Axes, timeline: Timeline) -> None:
    points = thin(timeline, _MOST_POINTS)
    shown = [category for category in CATEGORY_COLOURS if max(timeline.by_category[category])]
    layers = [[timeline.by_category[category][i] / GIB for i in points] for category in shown]
    colours = [CATEGORY_COLOURS[category] for category in shown]
    axes.stackplot(points, layers, step="post", labels=map(str, shown), colors=colours, linewidth=0)
    reserved = [timeline.reserved_bytes[i] / GIB for i in points]
    label = f"reserved, at most\n{max(reserved):.2f} GiB"
    axes.plot(points, reserved, "k", drawstyle="steps-post", linewidth=1.6, label=label)
    axes.set_xlim(0, len(timeline.allocated_bytes) - 1)
    axes.set_ylim(0, max(timeline.reserved_bytes) / GIB * 1.16)


def _phases(axes: Axes, timeline: Timeline) -> None:
    """Draw a line at the start of each step and phase, with labels.

    Phases narrower than their names have no label.
    """
    total, before = len(timeline.allocated_bytes), 0
    ends = [*(index for index, _ in timeline.marks), total][1:]
    for (start, mark), end in zip(timeline.marks, ends, strict=True):
        if mark.phase is Phase.END:
            continue
        new_step, before = mark.step > before, mark.step
        if start:
            width, dash = (1.0, "-") if new_step else (0.8, ":")
            axes.axvline(start, color="#666666", linewidth=width, linestyle=dash, zorder=1.5)
        if new_step:
            _label(axes, start, f" step {mark.step}", 0.985, "bold", "left")
        if end - start > _LETTER * len(mark.phase) * total and mark.step > 0:
            _label(axes, (start + end) / 2, str(mark.phase), 0.925, "normal", "center")


def _label(axes: Axes, x: float, text: str, height: float, weight: str, side: str) -> None:
    font: dict[str, Any] = {"fontsize": 10 if weight == "bold" else 9, "fontweight": weight}
    axes.text(x, height, text, transform=axes.get_xaxis_transform(), ha=side, va="top", **font)


def _peak(axes: Axes, explanation: Explanation) -> None:
    """Mark the allocated peak with a triangle, and write the peak's size in the legend."""
    level = explanation.run.peak_allocated_bytes / GIB
    label = f"peak allocated\n{level:.2f} GiB"
    axes.plot([explanation.peak.event], [level], "kv", markersize=6, zorder=4, label=label)


def _legend(axes: Axes) -> None:
    """Draw a legend to the right of the axes, with the topmost layer first."""
    handles, labels = axes.get_legend_handles_labels()
    right_of_axes: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axes.legend(handles[::-1], labels[::-1], fontsize=10, labelspacing=0.6, **right_of_axes)
