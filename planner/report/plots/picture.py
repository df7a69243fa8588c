"""Write a picture to a file; its suffix says which format. Matplotlib draws it in memory."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from planner._support.atomic_write import save

WHAT = "the picture"


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as it is. Raises DataFileError."""
    content = io.BytesIO()
    figure.savefig(content, format=_format(path))
    save(path, content.getvalue(), WHAT)


def save_cropped_picture(figure: Figure, path: Path) -> None:
    """Write a figure with all that lies outside of its axes. Raises DataFileError."""
    content = io.BytesIO()
    figure.savefig(content, format=_format(path), bbox_inches="tight")
    save(path, content.getvalue(), WHAT)


def _format(path: Path) -> str:
    return path.suffix.removeprefix(".")
