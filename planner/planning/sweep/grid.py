"""Read sweep files, which name a grid of models x recipes x GPUs.

    about: what the sweep is for
    models:
      - resnet50                # a name of the catalogue, SOURCE:NAME, or FILE.py:NAME (--allow-code)
      - {model: "timm:vit_tiny_patch16_224", input: [3x384x384], model_arg: {img_size: 384}, name: vit 384}
    recipes:                                # a name, and options as the command line has them
      sgd: {}
      amp: {optimizer: adamw, precision: amp-fp16, memory_format: channels_last}
    gpus: [RTX 4090, L4, 24000, words: H100]   # names, totals in MiB, words of `planner devices`; or all

All three lists are required. docs/sweep.md has the rest.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from planner._support.strict_yaml import Entry, read_entry
from planner.errors import UsageError
from planner.hardware import (
    LARGEST_TOTAL_MIB,
    Device,
    find_device,
    generic_device,
    load_devices,
    search_devices,
)
from planner.jobs import (
    OPTION_KEYS,
    SOURCES,
    CatalogueEntry,
    read_alloc_conf,
    read_arguments,
    read_count,
    read_items,
    read_model,
    read_options,
)
from planner.planning.sweep.task import GpuFigures

MOST_CELLS = 100_000


class NamedModel(Struct, frozen=True):
    """A model of the grid, with the job options that it has in every recipe."""

    name: str  # the model's name in the tables
    model: str  # a name of the catalogue, SOURCE:NAME or FILE.py:NAME
    options: Mapping[str, Any]  # options of its job


class Recipe(Struct, frozen=True):
    """A named set of training options. They take precedence over the options of the model."""

    name: str
    options: Mapping[str, Any]
    alloc_conf: str = ""
    allocator_cap_mib: int | None = None


class Grid(Struct, frozen=True):
    """The models, recipes and GPUs of a sweep file."""

    about: str
    models: tuple[NamedModel, ...]
    recipes: tuple[Recipe, ...]
    gpus: tuple[Device, ...]


def load_grid(
    path: Path, catalogue: Mapping[str, CatalogueEntry], sources: Collection[str] = SOURCES
) -> Grid:
    """Read the models, recipes and GPUs of a sweep file.

    Raises DataFileError with file, line and key for an invalid file. A model FILE.py:NAME, which would run
    code, is invalid unless `sources` contains "file".
    """
    top = read_entry(path)
    parts = top.children(("models", "recipes", "gpus"), optional=("about",))
    models = tuple(_model(item, catalogue, sources) for item in read_items(parts["models"]))
    recipes = tuple(_recipe(name, entry, sources) for name, entry in parts["recipes"].mapping().items())
    gpus = _gpus(parts["gpus"])
    _refuse_twice(parts["models"], [model.name for model in models])
    _refuse_twice(parts["gpus"], [gpu.name for gpu in gpus])
    if not recipes:
        raise parts["recipes"].broken("expected a recipe, such as sgd: {}")
    if len(models) * len(recipes) * len(gpus) > MOST_CELLS:
        raise top.broken(f"more than {MOST_CELLS:,} cells; split it into several files")
    about = parts["about"].text() if "about" in parts else path.name
    return Grid(about, models, recipes, gpus)


def _model(item: Entry, catalogue: Mapping[str, CatalogueEntry], sources: Collection[str]) -> NamedModel:
    if not isinstance(item.plain(), dict):
        read_model(item, catalogue, sources)
        return NamedModel(item.text(), item.text(), {})
    parts = item.children(("model",), ("name", "model_arg", *OPTION_KEYS))
    options = read_options(parts, sources)
    if "model_arg" in parts:
        options["model_args"] = read_arguments(parts["model_arg"])
    read_model(parts["model"], catalogue, sources, **options)
    model = parts["model"].text()
    return NamedModel(parts["name"].text() if "name" in parts else model, model, options)


def _recipe(name: str, entry: Entry, sources: Collection[str]) -> Recipe:
    parts = entry.children((), (*OPTION_KEYS, "alloc_conf", "allocator_cap_mib"))
    cap = parts.get("allocator_cap_mib")
    return Recipe(
        name,
        read_options(parts, sources),
        read_alloc_conf(parts["alloc_conf"]) if "alloc_conf" in parts else "",
        None if cap is None else read_count(cap, LARGEST_TOTAL_MIB),
    )


def _gpus(entry: Entry) -> tuple[Device, ...]:
    if entry.is_word("all"):
        return load_devices()
    return tuple(device for item in read_items(entry) for device in _devices(item))


def _devices(item: Entry) -> tuple[Device, ...]:
    value = item.plain()
    if isinstance(value, dict):
        words = item.children(("words",))["words"]
        devices = search_devices(load_devices(), [words.text()])
        if not devices:
            raise words.broken("no GPU of the database has these words")
        return devices
    try:
        if type(value) is int:
            return (generic_device(read_count(item, LARGEST_TOTAL_MIB)),)
        return (find_device(item.text()),)
    except UsageError as error:
        raise item.broken(str(error)) from None


def _refuse_twice(entry: Entry, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise entry.broken(f"{name!r} occurs twice here; remove one, or give a name of its own")


class Cell(msgspec.Struct, frozen=True):
    """The largest batch sizes and the process memory of one model in one recipe on one GPU."""

    model: str
    recipe: str
    figures: GpuFigures

    def row(self) -> dict[str, Any]:
        """Return a dictionary of the cell's model, recipe and figures by column name."""
        return {"model": self.model, "recipe": self.recipe, **msgspec.structs.asdict(self.figures)}


class Failure(msgspec.Struct, frozen=True):
    """A model and recipe that could not be planned, and the reason."""

    model: str
    recipe: str
    why: str


class SweepTable(msgspec.Struct, frozen=True):
    """The results of a sweep: its grid, cells and failures."""

    grid: Grid
    cells: tuple[Cell, ...]  # by model, recipe and GPU in the order of the file
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    new: int  # number of cells that this call computed
    seconds: float
