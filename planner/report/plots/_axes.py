"""Create, label and save the axes of pictures.

The suffix of the path selects the format.
"""

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from planner._support.atomic_write import save
from planner.hardware import MIB

GIB = 1024 * MIB
_WIDTH_INCHES, _DPI = 9.0, 110  # about 1000 pixels, as wide as a README shows a picture
_LABEL_POINTS, _TITLE_POINTS = 11, 12


def make_axes(height_inches: float) -> Axes:
    """Return the axes of a new picture."""
    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def label_axes(axes: Axes, title: str, x: str, y: str = "", pad: float | None = None) -> None:
    """Write the title above the axes, and label the x and y axes."""
    axes.set_title(title, fontsize=_TITLE_POINTS, loc="left", pad=pad)
    axes.set_xlabel(x, fontsize=_LABEL_POINTS)
    axes.set_ylabel(y, fontsize=_LABEL_POINTS)


def save_picture(axes: Axes, path: Path) -> None:
    """Write the picture to a file, including text outside the axes. Raises DataFileError."""
    content, figure = io.BytesIO(), axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(content, format=path.suffix.removeprefix("."), bbox_inches="tight")
    save(path, content.getvalue(), "the picture")
