"""Read published memory sizes, measured or estimated by tools, from measurements/*.yaml.

Each figure has its source. A file has the keys `source` (`title`, `framework` and `about`, and, if known,
`when`, `gpu` and `versions`), `units` (bytes in each unit), `figures` and perhaps `results`. An item of
`figures` has `model` (its name in models.yaml), `batch`, `points` (the counters measured at each point of the
run) or `estimates`, and perhaps a `note` and `kept` (models that were still on the GPU with their gradients,
so that the figures include them too). Nothing is rounded or converted: figures keep the digits that were
printed.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from planner._support.conversion import Text
from planner._support.strict_yaml import Entry, read_entry

END = "end"  # the point after the loop, its variables still alive
ESTIMATE = "estimate"  # stands for the point if a figure is the output of an estimator
PEAK_ALLOCATED, RESERVED = "peak_allocated", "reserved"

_COUNTERS = ("allocated", PEAK_ALLOCATED, "total_allocated", "total_freed")
_SUMS = ("input", "output", "parameters", "total")
KINDS = (
    # The allocator's counters at a point of a run, a peak since the source last reset it.
    *(f"{name}{pool}" for pool in ("", "_large_pool", "_small_pool") for name in _COUNTERS),
    RESERVED,
    "used",  # the whole GPU, by NVML
    # The output of estimators.
    *("formula_data", "formula_weight", "formula_forward_output", "formula_weight_gradient"),
    *("formula_output_gradient", "formula_training", "formula_inference"),
    *(f"{estimator}_{name}" for estimator in ("torchsummary", "modelsize") for name in _SUMS),
)

_Batch = Annotated[int, Meta(ge=1, le=2**31)]
_UnitBytes = Annotated[float, Meta(ge=0, le=2**40)]


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """The publication of figures, with its framework, GPU and versions."""

    title: Text
    framework: Literal["torch", "tensorflow"]
    about: Text
    when: Text | None = None
    gpu: Text | None = None  # None if it is not published
    versions: dict[str, Text] = {}


class Quantity(Struct, frozen=True):
    """A memory size with its number and unit as printed."""

    printed: str  # the number
    unit: str
    unit_bytes: float  # the size of the unit in the source

    @property
    def size_bytes(self) -> float:
        """Return the size in bytes, computed from the rounded number that was printed."""
        return float(self.printed) * self.unit_bytes


class Figure(Struct, frozen=True):
    """A published memory size of one model at one batch size."""

    model: str
    batch: int
    point: str  # point of the run: `END`, `ESTIMATE` or a name from the source
    kind: str  # one of `KINDS`
    quantity: Quantity
    source: Source
    note: str | None
    residents: tuple[str, ...] = ()  # names of earlier models that the figure includes, with their gradients


class ResultRow(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the notebook's table: the formula's total for training, the real peak and the error."""

    label: Text
    model: Text
    batch: _Batch
    estimated: Text
    real: Text
    error_percent: Annotated[float, Meta(ge=0, le=100)]  # without its sign, relative to the real value


class Archive(Struct, frozen=True):
    """The published figures and the rows of the notebook's table, in the order of their files."""

    figures: tuple[Figure, ...]
    results: tuple[ResultRow, ...]

    def look_up(self, model: str, batch: int, kind: str, point: str = END) -> tuple[Figure, ...]:
        """Return the figures of one kind for a model and batch size at a point.

        There is at most one figure for each source.
        """
        key = (model, batch, kind, point)
        return tuple(
            figure
            for figure in self.figures
            if (figure.model, figure.batch, figure.kind, figure.point) == key
        )


class _Figures(Struct, frozen=True, forbid_unknown_fields=True):
    model: Text
    batch: _Batch
    points: dict[str, dict[str, Text]] = {}
    estimates: dict[str, Text] = {}
    note: Text | None = None
    kept: tuple[Text, ...] = ()


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    source: Source
    units: dict[str, _UnitBytes]
    figures: tuple[_Figures, ...]
    results: tuple[ResultRow, ...] = ()


def load_measured(folder: Path | None = None) -> Archive:
    """Read all files of published figures in a folder, by default the planner's own.

    Raises DataFileError.
    """
    folder = folder or Path(__file__).parent / "measurements"
    files = [_read_file(path) for path in sorted(folder.glob("*.yaml"))]
    return Archive(
        figures=tuple(figure for file in files for figure in file.figures),
        results=tuple(row for file in files for row in file.results),
    )


def _read_file(path: Path) -> Archive:
    entry = read_entry(path)
    file = entry.convert(_File)
    figures: dict[tuple[str, int, str, str], Figure] = {}
    for place, row in zip(entry.mapping()["figures"].items(), file.figures, strict=True):
        if ESTIMATE in row.points:
            raise place.broken("estimates belong under the key estimates")
        points = row.points | ({ESTIMATE: row.estimates} if row.estimates else {})
        if not points:
            raise place.broken("missing points or estimates")
        for point, sizes in points.items():
            for kind, size in sizes.items():
                if kind not in KINDS:
                    raise place.broken(f"unknown kind {kind}; known are {', '.join(KINDS)}")
                key = (row.model, row.batch, point, kind)
                if key in figures:
                    raise place.broken(f"{kind} at {point} occurs twice in this file")
                quantity = _quantity(place, size, file.units)
                figures[key] = Figure(*key, quantity, file.source, row.note, row.kept)
    return Archive(tuple(figures.values()), file.results)


def _quantity(place: Entry, text: str, units: dict[str, float]) -> Quantity:
    number, _, unit = text.partition(" ")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) or unit not in units:
        raise place.broken(f"expected a number and one of the units {', '.join(units)}, got {text!r}")
    return Quantity(number, unit, units[unit])
