"""The report of `planner sweep` as document, JSON, CSV and Parquet."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.errors import ModelError
from planner.planning.sweep import GpuFigures, SweepTable
from planner.report.document import Block, Bullets, Column, Document, Entry, Paragraph, Table
from planner.report.units import SCHEMA, attributes, batch_text, csv_text

RETRIES = "*"
RETRYING = (
    "larger batches fit by allocator retries, which take time: max_batch of --json and --csv; * marks a cell "
    "in which none runs without"
)
_GPU_WIDTH, _RECIPE_WIDTH = 33, 11
_RECIPES = 5  # the most recipes next to each other in a table

_Cells = Mapping[tuple[str, str, str], GpuFigures]  # by model, recipe and GPU


def sweep_document(table: SweepTable) -> Document:
    """Return the report of `planner sweep`: for each model, the largest batches by GPU and recipe."""
    grid = table.grid
    cells = {(cell.model, cell.recipe, cell.figures.gpu): cell.figures for cell in table.cells}
    closing: list[Block] = [
        Entry("Failed", f"{failure.model} {failure.recipe}: {failure.why}") for failure in table.failures
    ]
    retrying = any(cell.figures.comfortable_batch < cell.figures.max_batch for cell in table.cells)
    notes = [RETRYING] if retrying else []
    if table.unknown_ops:
        notes.append(f"scratch memory is not counted for {', '.join(table.unknown_ops)}")
    closing += [Bullets("", tuple(notes))] if notes else []
    count = (
        f"{len(table.cells):,} cells, {table.new:,} of them new, {len(table.failures):,} jobs failed, "
        f"in {table.seconds:.1f} s"
    )
    return Document.of(
        [Paragraph(grid.about)],
        *(_model_section(table, model.name, cells) for model in grid.models),
        [*closing, Paragraph(count, "faint")],
    )


def _model_section(table: SweepTable, model: str, cells: _Cells) -> Iterator[Block]:
    yield Paragraph(f"{model}: largest batch without retries", "strong")
    names = [recipe.name for recipe in table.grid.recipes]
    for start in range(0, len(names), _RECIPES):
        yield _table(table, model, names[start : start + _RECIPES], cells)


def _table(table: SweepTable, model: str, recipes: Sequence[str], cells: _Cells) -> Table:
    columns = (Column(name, is_number=True, min_width=_RECIPE_WIDTH) for name in recipes)
    rows = (
        (gpu.name, *(_batch(cells.get((model, recipe, gpu.name))) for recipe in recipes))
        for gpu in table.grid.gpus
    )
    return Table((Column("GPU", min_width=_GPU_WIDTH), *columns), tuple(rows), indent=0)


def _batch(cell: GpuFigures | None) -> str:
    if cell is None:
        return "failed"
    if cell.max_batch and not cell.comfortable_batch:
        return f"{cell.max_batch:,}{RETRIES}"
    return batch_text(cell.comfortable_batch)


def sweep_to_json(table: SweepTable) -> dict[str, Any]:
    """Return the JSON object of `planner sweep`. MiB are rounded to 0.001."""
    return {
        "schema": SCHEMA,
        "about": table.grid.about,
        "cells": [cell.row() for cell in table.cells],
        **attributes(table, "failures"),
        "new_cells": table.new,
        "assumptions": list(table.notes),
        **attributes(table, "unknown_ops"),
        "seconds": round(table.seconds, 3),
    }


def sweep_to_csv(table: SweepTable) -> str:
    """Return the cells as CSV, with one line per cell after a header. A figure is empty if no batch fits."""
    return csv_text(_names(), (cell.row() for cell in table.cells))


def sweep_to_parquet(table: SweepTable) -> bytes:
    """Return the cells as a typed Parquet file with the CSV's columns. Raises ModelError without pyarrow."""
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


def _names() -> list[str]:
    return ["model", "recipe", *GpuFigures.__struct_fields__]
