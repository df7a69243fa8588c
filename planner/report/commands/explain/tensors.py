"""The largest blocks in use at the peak."""

from typing import Any

from planner.planning import Explanation, LiveBlock
from planner.program import Phase
from planner.report.describe import shape_text, short_op
from planner.report.document import Block, Cell, Column, Paragraph, Table
from planner.report.plots.colours import CATEGORY_COLOURS
from planner.report.units import attributes, mib_text

LISTED_WIDTH = 15  # columns of a size in a list of blocks


def tensors_section(explanation: Explanation, top: int) -> list[Block]:
    """Return the largest blocks in use at the peak, each with the line of code behind it if that is known."""
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
    """Return a block; what is not known of its tensor is null, as in a trace saved by `estimate`."""
    known = attributes(block.detail, "shape", "dtype", "source", "code")
    return {
        **attributes(block, "size_bytes", "requested_bytes", "category", "module", "op", "step", "phase"),
        "shape": known["shape"] if known["dtype"] else None,
        **{name: known[name] or None for name in ("dtype", "source", "code")},
    }
