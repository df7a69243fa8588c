"""A sweep as tables, JSON, CSV and Parquet."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from planner.errors import ModelError
from planner.planning import LARGEST_BATCH
from planner.planning.sweep import Failure, GpuFigures, SweepTable
from planner.report.commands.as_json import SCHEMA
from planner.report.layout import wrapped

_GPU_WIDTH, _RECIPE_WIDTH = 33, 13
RETRIES = "*"
RETRYING = (
    "larger batches fit by allocator retries, which take time: max_batch of --json and --csv; * marks a cell "
    "in which none runs without"
)
_RECIPES = 5  # beside each other


def sweep_to_json(table: SweepTable) -> dict[str, Any]:
    """The JSON object of `planner sweep`; MiB are rounded to 0.001."""
    return {
        "schema": SCHEMA,
        "about": table.grid.about,
        "cells": [cell.row() for cell in table.cells],
        "failures": [msgspec.structs.asdict(failure) for failure in table.failures],
        "new_cells": table.new,
        "assumptions": list(table.notes),
        "unknown_ops": list(table.unknown_ops),
        "seconds": round(table.seconds, 3),
    }


def sweep_csv(table: SweepTable) -> str:
    """A line of names, then one for each cell; empty where nothing fits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _names(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cell.row() for cell in table.cells)
    return text.getvalue()


def sweep_parquet(table: SweepTable) -> bytes:
    """The same columns as a Parquet file, typed; null where nothing fits.

    Raises ModelError without pyarrow.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ModelError("pyarrow is not installed; pip install 'gpu-batch-planner[sweep]'") from error
    kinds = {"total_mib": pyarrow.float64(), "calibrated": pyarrow.bool_()}
    kinds |= dict.fromkeys(("max_batch", "comfortable_batch"), pyarrow.int64())
    kinds |= dict.fromkeys(("process_mib", "process_upper_mib", "headroom_mib"), pyarrow.float64())
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in _names()])
    sink = pyarrow.BufferOutputStream()
    rows = [cell.row() for cell in table.cells]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), sink)
    return bytes(sink.getvalue())


def sweep_text(table: SweepTable) -> str:
    """A table for each model: the largest batch of each GPU in each recipe that runs at full speed; at most
    100 columns wide.
    """
    grid = table.grid
    lines = wrapped("", grid.about)
    found = {(cell.model, cell.recipe, cell.figures.gpu): cell.figures for cell in table.cells}
    for model in grid.models:
        lines += ["", f"{model.name}: largest batch without retries"]
        for start in range(0, len(grid.recipes), _RECIPES):
            recipes = [recipe.name for recipe in grid.recipes[start : start + _RECIPES]]
            lines += _table(model.name, recipes, [gpu.name for gpu in grid.gpus], found)
    lines += [""] + [line for failure in table.failures for line in wrapped("Failed: ", _said(failure))]
    if any(cell.figures.comfortable_batch < cell.figures.max_batch for cell in table.cells):
        lines += wrapped("  - ", RETRYING)
    if table.unknown_ops:
        lines += wrapped("  - ", f"scratch memory is not counted for {', '.join(table.unknown_ops)}")
    lines.append(
        f"{len(table.cells):,} cells, {table.new:,} of them new, {len(table.failures):,} jobs failed, "
        f"in {table.seconds:.1f} s"
    )
    return "\n".join(lines)


def _table(
    model: str, recipes: Sequence[str], gpus: Sequence[str], found: dict[tuple[str, str, str], GpuFigures]
) -> Iterator[str]:
    yield f"{'GPU':<{_GPU_WIDTH}}" + "".join(
        f"{name[: _RECIPE_WIDTH - 1]:>{_RECIPE_WIDTH}}" for name in recipes
    )
    for gpu in gpus:
        shown = [_batch(found.get((model, recipe, gpu))) for recipe in recipes]
        yield f"{gpu:<{_GPU_WIDTH}.{_GPU_WIDTH}}" + "".join(f"{text:>{_RECIPE_WIDTH}}" for text in shown)


def _batch(cell: GpuFigures | None) -> str:
    if cell is None:
        return "failed"
    if cell.comfortable_batch >= LARGEST_BATCH:
        return "any"
    if cell.comfortable_batch < cell.max_batch:
        return f"{cell.max_batch:,}{RETRIES}" if not cell.comfortable_batch else f"{cell.comfortable_batch:,}"
    return f"{cell.max_batch:,}" if cell.max_batch else "none"


def _said(failure: Failure) -> str:
    return f"{failure.model} {failure.recipe}: {failure.why}"


def _names() -> list[str]:
    return ["model", "recipe", *GpuFigures.__struct_fields__]
