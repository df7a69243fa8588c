"""Draw the picture of `planner compare` with matplotlib (the extra `plot`)."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from planner.planning.estimators import ALLOCATED, NAMES, PROCESS, RESERVED, Comparison
from planner.report.describe import describe_loop
from planner.report.plots._axes import GIB, label_axes, make_axes, save_picture
from planner.report.units import signed_percent

OWN, OTHERS, TRUTH = "#1f6fb4", "#b9bec4", "#c1272d"
_OWN_ROWS = {ALLOCATED: OWN, RESERVED: "#6fa3d2", PROCESS: "#a9c8e6"}
_SIZES_END, _ERRORS_END = 1.09, 1.24  # right ends of the columns of figures, as multiples of the axes' width


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Save a picture with a bar for each estimator, and lines at measured values. Raises DataFileError."""
    axes = make_axes(4.4)
    _bars(axes, comparison)
    _truth(axes, comparison)
    _label(axes, comparison)
    save_picture(axes, path)


def _bars(axes: Axes, comparison: Comparison) -> None:
    """Draw a bar for each estimator, with its size and error on the right."""
    along_y = axes.get_yaxis_transform()
    rows = comparison.rows
    for place, row in enumerate(rows):
        axes.barh(place, (row.size_bytes or 0) / GIB, height=0.68, color=_OWN_ROWS.get(row.key, OTHERS))
        size = "refused" if row.size_bytes is None else f"{row.size_bytes / GIB:.2f}"
        error = "" if row.error is None else signed_percent(row.error)
        for x, text in ((_SIZES_END, size), (_ERRORS_END, error)):
            axes.text(x, place, text, transform=along_y, ha="right", va="center", fontsize=11)
    for x, text in ((_SIZES_END, "GiB"), (_ERRORS_END, "error" if comparison.measured else "vs ours")):
        axes.text(x, -0.75, text, transform=along_y, ha="right", va="center", fontsize=11, color="#555555")
    axes.set_yticks(range(len(rows)), [NAMES[row.key] for row in rows], fontsize=11)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _truth(axes: Axes, comparison: Comparison) -> None:
    """Draw lines at the measured allocated peak and reserved memory.

    The line at the allocated peak spans all bars; the line at the reserved memory is short. Draws nothing if
    no measured value is stored.
    """
    if comparison.measured is None:
        return
    measured = comparison.measured.allocated_bytes / GIB
    axes.axvline(measured, color=TRUTH, linewidth=1.8, zorder=3)
    whose = "measured, this model alone" if comparison.measured.residents else "measured"
    side, above = "right" if measured > axes.get_xlim()[1] / 2 else "left", ("data", "axes fraction")
    font: dict[str, Any] = {"color": TRUTH, "fontsize": 11, "ha": side, "va": "bottom"}
    axes.annotate(f"{whose}: {measured:.2f}", (measured, 1.01), xycoords=above, **font)
    for place, row in enumerate(comparison.rows):
        if row.key == RESERVED and row.yardstick_bytes is not None:
            x = row.yardstick_bytes / GIB
            axes.plot([x, x], [place - 0.4, place + 0.4], color=TRUTH, linewidth=1.8, linestyle=(0, (1, 1)))


def _label(axes: Axes, comparison: Comparison) -> None:
    note = "no measured value is stored"
    if comparison.measured is not None:
        note = "line: measured peak allocated"
        if comparison.measured.own_reserved_bytes is not None:
            note += "; dotted: measured reserved"
    title = f"{comparison.job.model.name}, batch {comparison.batch}: {describe_loop(comparison.job)}"
    label_axes(axes, title, f"GiB ({note})", pad=26)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
