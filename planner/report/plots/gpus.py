"""Draw the picture of `planner gpus`: the peak memory by batch size, with a line for each GPU."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from planner.errors import UsageError
from planner.hardware import ProductLine
from planner.planning import DeviceFit, FleetTable, curve
from planner.program import Outcome
from planner.report.describe import describe_loop
from planner.report.plots._axes import GIB, label_axes, make_axes, save_picture

OWN, LINES, TEXT = "#1f6fb4", "#c9ced4", "#333333"
CURVE = "on a GPU with memory to spare"
DOTS = "on a GPU at the right, with its own CUDA context"
DOTS_WITH_RETRIES = "on a GPU at the right, with retries:\ncached memory is released, so less is reserved"
_MOST_LABELS = 12  # the most GPUs that are all drawn; a selection is drawn if there are more
_LABEL_POINTS = 10.5
_NUMBERS_END = 1.11  # right end of the column of batch sizes, as a multiple of the axes' width
_LEADER = {"arrowstyle": "-", "color": LINES, "linewidth": 0.9}
_LEADER_ENDS = {"shrinkA": 2, "shrinkB": 0, "relpos": (0, 0.5)}
_LABEL_SHARE = 0.048  # share of the axes' height that one name needs


def draw_gpus(table: FleetTable, path: Path) -> None:
    """Save a picture of the job's memory curve and of the GPUs that run the job.

    Only a selection is drawn if many GPUs run the job. Raises UsageError if no GPU runs the job,
    DataFileError if the file cannot be written.
    """
    fits = sorted((fit for fit in table.fits if fit.max_batch), key=_memory)
    if not fits:
        raise UsageError("--plot: no GPU runs the job, so there is nothing to draw")
    axes = make_axes(5.2)
    draw_on(axes, table, named_gpus(fits))
    save_picture(axes, path)


def draw_on(axes: Axes, table: FleetTable, fits: list[DeviceFit]) -> None:
    """Draw the job's memory curve and GPUs, with a title and a legend."""
    batches, sizes = zip(*curve(table), strict=True)
    levels = [size_bytes / GIB for size_bytes in sizes]
    axes.plot(batches, levels, color=OWN, linewidth=2.2, zorder=3, label=CURVE)
    _draw_gpus(axes, fits)
    title = f"{table.job.model.name}: {describe_loop(table.job)}, {table.job.loop.precision}"
    title += f"\nlargest batch at confidence {table.confidence:g}"
    label_axes(axes, title, "batch size", "GiB of the process at its peak")
    axes.grid(axis="x", color=LINES, linewidth=0.5, alpha=0.6)
    _legend(axes)


def named_gpus(fits: list[DeviceFit]) -> list[DeviceFit]:
    """Return the GPUs to draw: all if they are few, else the smallest, the largest and well-known GPUs.

    If some are left out, the result is sorted by ascending memory.
    """
    if len(fits) <= _MOST_LABELS:
        return fits
    whole = [fit for fit in fits if not _is_slice(fit)] or fits
    apart = _LABEL_SHARE / 2 * max(map(_memory, whole))  # names may be moved off their lines a little
    ends = [min(whole, key=lambda fit: (_memory(fit), _renown(fit)))]
    ends.append(min(whole, key=lambda fit: (-_memory(fit), _renown(fit))))
    named: list[DeviceFit] = []
    for fit in [*ends, *sorted(whole, key=_renown)]:
        if all(abs(_memory(fit) - _memory(other)) >= apart for other in named):
            named.append(fit)
    return sorted(named, key=_memory)


def _memory(fit: DeviceFit) -> int:
    return fit.budget.device.usable.value


def _renown(fit: DeviceFit) -> tuple[int, int, int, str]:
    """Return a sort key that puts well-known GPUs first.

    The order is by product line, then newer and faster GPUs.
    """
    device = fit.budget.device
    about, (major, minor) = device.about, device.capability
    if about is None:
        return len(ProductLine), -major, -minor, device.name
    order = (ProductLine.CONSUMER, ProductLine.DATACENTER, ProductLine.WORKSTATION, ProductLine.SLICE)
    speed = 0 if about.bandwidth is None else round(about.bandwidth.value)
    return order.index(about.line), -(10 * major + minor), -speed, device.name


def _is_slice(fit: DeviceFit) -> bool:
    about = fit.budget.device.about
    return about is not None and about.line is ProductLine.SLICE


def _draw_gpus(axes: Axes, fits: list[DeviceFit]) -> None:
    """Draw each GPU's memory as a line with its name and largest batch, and its batch's memory as a dot."""
    top = max(fit.max_batch for fit in fits)
    heights = [_memory(fit) / GIB for fit in fits]
    axes.set_ylim(0, 1.06 * max(heights))
    axes.set_xlim(0, 1.03 * top)
    for fit, height, label in zip(fits, heights, _apart(heights, axes.get_ylim()[1]), strict=True):
        axes.plot([0, 1.03 * top], [height, height], color=LINES, linewidth=0.9, zorder=1)
        axes.plot([fit.batch], [fit.process_bytes / GIB], zorder=4, **_dot(fit))
        name, right, along_y = fit.budget.device.name, axes.get_xlim()[1], axes.get_yaxis_transform()
        font: dict[str, Any] = {"fontsize": _LABEL_POINTS, "va": "center"}
        number = {**font, "fontweight": "bold", "color": OWN, "ha": "right"}
        at = (_NUMBERS_END, label)
        number |= {"arrowprops": _LEADER | _LEADER_ENDS, "xytext": at, "textcoords": along_y}
        axes.annotate(f"{fit.max_batch:,}", (right, height), **number)
        axes.text(_NUMBERS_END + 0.015, label, name, transform=along_y, color=TEXT, **font)


def _dot(fit: DeviceFit) -> dict[str, Any]:
    """Return matplotlib's arguments for a GPU's dot: its style and its legend text.

    The dot is hollow if the batch fits with retries.
    """
    plain = {"marker": "o", "markersize": 5, "linestyle": "none", "color": OWN}
    if fit.outcome is Outcome.FITS_WITH_RETRIES:
        return {**plain, "markerfacecolor": "white", "label": DOTS_WITH_RETRIES}
    return {**plain, "label": DOTS}


def _legend(axes: Axes) -> None:
    """Draw a legend with one entry for each distinct label."""
    handles, labels = axes.get_legend_handles_labels()
    kinds = dict(zip(labels, handles, strict=True))
    axes.legend(kinds.values(), kinds.keys(), loc="upper left", fontsize=9, frameon=True, edgecolor=LINES)


def _apart(heights: list[float], ceiling: float) -> list[float]:
    """Return the heights at which to write GPU names: `heights`, moved apart so that no names overlap.

    `heights` are ascending, and no result exceeds `ceiling`.
    """
    step = _LABEL_SHARE * ceiling
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + step) if placed else max(height, step / 2))
    overflow = placed[-1] - (ceiling - step / 2)
    if overflow > 0:
        placed[-1] -= overflow
        for index in range(len(placed) - 2, -1, -1):
            placed[index] = min(placed[index], placed[index + 1] - step)
    return placed
