"""Published figures of the seed documents, measured or estimated, each with its provenance.

The figures stand in measurements/*.yaml. A file has the keys `source` (`title`, `framework` and `about`, and,
where known, `when`, `gpu` and `versions`), `units` (bytes in each unit), `figures` and perhaps `results`. An
item of `figures` has `model` (its name in models.yaml), `batch`, `points` (what was measured where) or
`estimates`, and perhaps a `note` and `kept` (models that were still on the GPU with their gradients, so that
the figures hold them too). Nothing is rounded or converted: figures keep the digits that were printed.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from planner._support.strict_yaml import Entry, read_entry

MAX_BATCH = 2**31
MAX_UNIT_BYTES = 2**40

END = "end"  # the point after the loop, its names still alive
ESTIMATE = "estimate"  # no point of a run: what an estimator said


class Kind(StrEnum):
    """The kind of a figure."""

    # The allocator's counters at a point of a run.
    ALLOCATED = "allocated"
    RESERVED = "reserved"
    PEAK_ALLOCATED = "peak_allocated"  # since the source last reset it
    USED = "used"  # the whole GPU, by NVML
    TOTAL_ALLOCATED = "total_allocated"  # all that was ever allocated
    TOTAL_FREED = "total_freed"
    ALLOCATED_LARGE_POOL = "allocated_large_pool"
    PEAK_ALLOCATED_LARGE_POOL = "peak_allocated_large_pool"
    TOTAL_ALLOCATED_LARGE_POOL = "total_allocated_large_pool"
    TOTAL_FREED_LARGE_POOL = "total_freed_large_pool"
    ALLOCATED_SMALL_POOL = "allocated_small_pool"
    PEAK_ALLOCATED_SMALL_POOL = "peak_allocated_small_pool"
    TOTAL_ALLOCATED_SMALL_POOL = "total_allocated_small_pool"
    TOTAL_FREED_SMALL_POOL = "total_freed_small_pool"
    # What estimators said.
    FORMULA_DATA = "formula_data"
    FORMULA_WEIGHT = "formula_weight"
    FORMULA_FORWARD_OUTPUT = "formula_forward_output"
    FORMULA_WEIGHT_GRADIENT = "formula_weight_gradient"
    FORMULA_OUTPUT_GRADIENT = "formula_output_gradient"
    FORMULA_TRAINING = "formula_training"
    FORMULA_INFERENCE = "formula_inference"
    TORCHSUMMARY_INPUT = "torchsummary_input"
    TORCHSUMMARY_OUTPUT = "torchsummary_output"
    TORCHSUMMARY_PARAMETERS = "torchsummary_parameters"
    TORCHSUMMARY_TOTAL = "torchsummary_total"
    MODELSIZE_INPUT = "modelsize_input"
    MODELSIZE_OUTPUT = "modelsize_output"
    MODELSIZE_PARAMETERS = "modelsize_parameters"
    MODELSIZE_TOTAL = "modelsize_total"


class Source(Struct, frozen=True):
    """The origin of figures."""

    title: str
    framework: str  # torch or tensorflow
    about: str
    when: str | None
    gpu: str | None  # None: not told
    versions: tuple[tuple[str, str], ...]


class Quantity(Struct, frozen=True):
    """A size as it was printed."""

    printed: str  # the number
    unit: str
    unit_bytes: float  # what the source means by the unit

    @property
    def size_bytes(self) -> float:
        """Return the size, no more exact than it was printed."""
        return float(self.printed) * self.unit_bytes


class Figure(Struct, frozen=True):
    """One size, of one model at one batch size."""

    model: str
    batch: int
    point: str  # of the run; `END`, `ESTIMATE` or the source's own
    kind: Kind
    quantity: Quantity
    source: Source
    note: str | None
    kept: tuple[str, ...] = ()  # names of earlier models that the figure holds, with their gradients


class ResultRow(Struct, frozen=True):
    """A row of the notebook's table: the formula's total for training beside the highest allocated."""

    label: str
    model: str
    batch: int
    estimated: Quantity
    real: Quantity
    error_percent: str  # as printed: without its sign, relative to the real value
    source: Source


class Archive(Struct, frozen=True):
    """All that is stored, in the order of the sources."""

    figures: tuple[Figure, ...]
    results: tuple[ResultRow, ...]

    def look_up(self, model: str, batch: int, kind: Kind, point: str = END) -> tuple[Figure, ...]:
        """Return the figures of one model, batch size and kind at one point: none, one, or one for each
        source.
        """
        key = (model, batch, kind, point)
        return tuple(
            figure
            for figure in self.figures
            if (figure.model, figure.batch, figure.kind, figure.point) == key
        )


def load_measured(folder: Path | None = None) -> Archive:
    """Read a folder of such files, by default the planner's own. Raises `DataFileError`."""
    files = [_read_file(path) for path in sorted((folder or _own_folder()).glob("*.yaml"))]
    return Archive(
        figures=tuple(figure for file in files for figure in file.figures),
        results=tuple(row for file in files for row in file.results),
    )


def _own_folder() -> Path:
    return Path(__file__).parent / "measurements"


def _read_file(path: Path) -> Archive:
    values = read_entry(path).children(("source", "units", "figures"), ("results",))
    source = _source(values["source"])
    units = {name: unit.number(0, MAX_UNIT_BYTES) for name, unit in values["units"].mapping().items()}
    rows = values["results"].items() if "results" in values else []
    return Archive(
        figures=tuple(_figures(values["figures"].items(), units, source)),
        results=tuple(_row(row, units, source) for row in rows),
    )


def _source(entry: Entry) -> Source:
    values = entry.children(("title", "framework", "about"), ("when", "gpu", "versions"))
    versions = values["versions"].mapping() if "versions" in values else {}
    return Source(
        title=values["title"].text(),
        framework=values["framework"].choice(("torch", "tensorflow")),
        about=values["about"].text(),
        when=values["when"].text() if "when" in values else None,
        gpu=values["gpu"].text() if "gpu" in values else None,
        versions=tuple((name, version.text()) for name, version in versions.items()),
    )


def _figures(entries: Iterable[Entry], units: dict[str, float], source: Source) -> list[Figure]:
    figures: dict[tuple[str, int, str, str], Figure] = {}
    for entry in entries:
        values = entry.children(("model", "batch"), ("points", "estimates", "note", "kept"))
        model, batch = values["model"].text(), _batch(values["batch"])
        note = values["note"].text() if "note" in values else None
        kept = tuple(item.text() for item in values["kept"].items()) if "kept" in values else ()
        points = values["points"].mapping() if "points" in values else {}
        if ESTIMATE in points:
            raise points[ESTIMATE].broken("estimates stand under the key estimates")
        if "estimates" in values:
            points[ESTIMATE] = values["estimates"]
        if not points:
            raise entry.broken("missing points or estimates")
        for point, sizes in points.items():
            for name, size in sizes.mapping().items():
                key = (model, batch, point, name)
                if name not in list(Kind):
                    raise size.broken(f"unknown kind; known are {', '.join(Kind)}")
                if key in figures:
                    raise size.broken("the same figure stands in this file twice")
                figures[key] = Figure(
                    model, batch, point, Kind(name), _quantity(size, units), source, note, kept
                )
    return list(figures.values())


def _row(entry: Entry, units: dict[str, float], source: Source) -> ResultRow:
    values = entry.children(("label", "model", "batch", "estimated", "real", "error_percent"))
    values["error_percent"].number(0, 100)
    return ResultRow(
        label=values["label"].text(),
        model=values["model"].text(),
        batch=_batch(values["batch"]),
        estimated=_quantity(values["estimated"], units),
        real=_quantity(values["real"], units),
        error_percent=str(values["error_percent"].node.value),
        source=source,
    )


def _batch(entry: Entry) -> int:
    number = entry.number(1, MAX_BATCH)
    if number != int(number):
        raise entry.broken(f"a whole number is wanted, not {number}")
    return int(number)


def _quantity(entry: Entry, units: dict[str, float]) -> Quantity:
    text = entry.text()
    number, _, unit = text.partition(" ")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) or unit not in units:
        raise entry.broken(f"a number and one of the units {', '.join(units)} are wanted, not {text!r}")
    return Quantity(number, unit, units[unit])
