"""The largest blocks in use at the peak."""

from typing import Any

from planner.planning import Explanation, LiveBlock
from planner.program import Phase
from planner.report.describe import shape_text, short_op
from planner.report.document import Block, Cell, Column, Paragraph, Table
from planner.report.plots.colours import CATEGORY_COLOURS
from planner.report.units import mib_text

LISTED_WIDTH = 15  # columns of a size in a list of blocks


def tensors_section(explanation: Explanation, top: int) -> list[Block]:
    """Return the largest blocks in use at the peak, each with the line of code behind it where that is
    known.
    """
    columns = (Column(is_number=True, min_width=LISTED_WIDTH), Column(min_width=11), Column())
    rows = tuple(map(_row, explanation.blocks[:top]))
    return [Paragraph(tensors_title(explanation), "strong"), Table(columns, rows, indent=0)]


def tensors_title(explanation: Explanation) -> str:
    """Return what the list is taken from."""
    return f"Largest of the {len(explanation.blocks):,} blocks in use at the peak"


def _row(block: LiveBlock) -> tuple[Cell | str, ...]:
    detail = block.detail
    source = "" if detail is None or not detail.source else f"{detail.source}  {detail.code}"
    return (
        f"{mib_text(block.size_bytes)} MiB",
        Cell(str(block.category), colour=CATEGORY_COLOURS[block.category]),
        Cell(_block_text(block), detail=source),
    )


def _block_text(block: LiveBlock) -> str:
    """Return what a block holds and who asked for it."""
    born = "" if block.phase is Phase.SETUP else f", step {block.step} {block.phase}"
    where = f" in {block.module}" if block.module else ""
    tensor = f"{held}  " if (held := tensor_text(block)) else ""
    return f"{tensor}{short_op(block.op)}{where}{born}"


def tensor_text(block: LiveBlock) -> str:
    """Return what a block holds, such as `64x3x224x224 float32`; "" where that is not known."""
    detail = block.detail
    return "" if detail is None or not detail.dtype else f"{shape_text(detail.shape)} {detail.dtype}"


def block_to_json(block: LiveBlock) -> dict[str, Any]:
    """Return a block; shape, dtype, source and code are null where they are not known, as in a trace saved by
    `estimate`.
    """
    detail = block.detail
    holds = detail is not None and detail.dtype
    return {
        "size_bytes": block.size_bytes,
        "requested_bytes": block.requested_bytes,
        "category": block.category.value,
        "module": block.module,
        "op": block.op,
        "step": block.step,
        "phase": block.phase.value,
        "shape": list(detail.shape) if detail is not None and holds else None,
        "dtype": detail.dtype if detail is not None and holds else None,
        "source": (detail.source or None) if detail is not None else None,
        "code": (detail.code or None) if detail is not None else None,
    }
