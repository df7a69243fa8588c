"""A picture of a run: what is allocated, for what, and reserved, event by event; needs matplotlib."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from planner.allocator import Timeline, thin
from planner.planning import Explanation
from planner.program import Phase
from planner.report.plots._axes import GIB, label_axes, make_axes, save_picture
from planner.report.plots.colours import CATEGORY_COLOURS

_MOST_POINTS = 2000  # that a picture of this width can tell apart
_LETTER = 0.0108  # of the width: a phase with less room than its name needs is left without it


def draw_timeline(explanation: Explanation, caption: str, path: Path) -> None:
    """Draw the categories stacked under the line of what is reserved. Raises DataFileError."""
    axes = make_axes(4.6)
    _levels(axes, explanation.timeline)
    _phases(axes, explanation.timeline)
    _peak(axes, explanation)
    _legend(axes)
    label_axes(axes, caption, "allocations and frees, in order", "GiB")
    save_picture(axes, path)


def _levels(axes: Axes, timeline: Timeline) -> None:
    points = thin(timeline, _MOST_POINTS)
    shown = [
        (category, colour)
        for category, colour in CATEGORY_COLOURS.items()
        if max(timeline.by_category[category])
    ]
    layers = [[timeline.by_category[category][i] / GIB for i in points] for category, _ in shown]
    axes.stackplot(
        points,
        layers,
        step="post",
        labels=[str(category) for category, _ in shown],
        colors=[colour for _, colour in shown],
        linewidth=0,
    )
    reserved = [timeline.reserved_bytes[i] / GIB for i in points]
    axes.plot(
        points,
        reserved,
        drawstyle="steps-post",
        color="black",
        linewidth=1.6,
        label=f"reserved, at most\n{max(reserved):.2f} GiB",
    )
    axes.set_xlim(0, len(timeline.allocated_bytes) - 1)
    axes.set_ylim(0, max(timeline.reserved_bytes) / GIB * 1.16)


def _phases(axes: Axes, timeline: Timeline) -> None:
    """Draw a line where each step begins and a fainter one for its phases, with the names of the wider
    ones.
    """
    total = len(timeline.allocated_bytes)
    starts = [index for index, _ in timeline.marks]
    before = 0
    for (start, mark), end in zip(timeline.marks, [*starts[1:], total], strict=True):
        if mark.phase is Phase.END:
            continue
        new_step = mark.step > before
        before = mark.step
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
    """Draw a mark on the allocated peak; its figure stands in the legend, where nothing lies under it."""
    level = explanation.run.peak_allocated_bytes / GIB
    axes.plot(
        [explanation.peak.event],
        [level],
        marker="v",
        color="black",
        markersize=6,
        linestyle="none",
        zorder=4,
        label=f"peak allocated\n{level:.2f} GiB",
    )


def _legend(axes: Axes) -> None:
    """Name the layers beside the picture, the highest first, as they lie in it."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=10,
        labelspacing=0.6,
    )
