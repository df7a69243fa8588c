"""Build the tables of an explained run.

They show levels of memory, and the peak by module and block.
"""

from collections.abc import Iterator
from typing import Any

from planner.planning import Explanation, LiveBlock, ModuleShare, fold
from planner.program import Category, Phase
from planner.report.describe import place_text, shape_text, short_op
from planner.report.document import Block, Cell, Column, Paragraph, Table
from planner.report.plots.colours import CATEGORY_COLOURS
from planner.report.units import NAME_WIDTH, attributes, figures_table, memory_table, mib_column, mib_text

LISTED_WIDTH = 15  # width of a size in a list of blocks
MIN_SHARE = 0.005  # share of the peak below which modules are summed up in one line
MAX_LINES = 30  # the most lines for modules, which limits the levels that are shown by default
OUTSIDE = "(outside of modules)"


# ---- levels: when the peaks are reached, how high each step goes, and what gaps cost


def peak_text(explanation: Explanation) -> str:
    """Return text with the size of the allocated peak and the place where it occurs."""
    return f"{mib_text(explanation.run.peak_allocated_bytes)} MiB in {place_text(explanation.peak)}"


def levels_table(explanation: Explanation) -> Table:
    """Return a table of each step's peaks and final memory, the highest step's phases, and the evaluation."""
    return figures_table("Highest levels", ("allocated", "reserved", "at the end"), _levels(explanation))


def _levels(explanation: Explanation) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for step in explanation.steps:
        name = "set-up" if step.step == 0 else f"step {step.step}"
        yield name, (step.allocated_bytes, step.reserved_bytes, step.end_allocated_bytes)
        for phase in explanation.phases:
            if phase.step == step.step == explanation.peak.step > 0:
                levels = (phase.allocated_bytes, phase.reserved_bytes, phase.end_allocated_bytes)
                yield f"  {phase.phase}", levels
    run = explanation.evaluation
    if run is not None:
        yield "evaluation alone", (run.peak_allocated_bytes, run.peak_reserved_bytes, run.end_allocated_bytes)


def fragmentation_table(explanation: Explanation) -> Table:
    """Return a table that divides the reserved peak into allocated bytes, gaps and free segments."""
    gaps = explanation.fragmentation
    largest = [
        f"{mib_text(gap.size_bytes)} of {mib_text(gap.segment_bytes)}" for gap in gaps.largest_gaps[:3]
    ]
    between = f"between blocks in use, largest {', '.join(largest)}" if largest else "between blocks in use"
    rows = [
        ("reserved", gaps.reserved_bytes, place_text(gaps.location)),
        ("allocated then", gaps.allocated_bytes, f"{mib_text(gaps.rounding_bytes)} of it by rounding up"),
        ("gaps", gaps.gap_bytes, between),
        ("free segments", gaps.free_segment_bytes, "given back to CUDA where memory is short"),
    ]
    return memory_table("At the reserved peak", rows)


# ---- modules


def modules_tables(explanation: Explanation, depth: int | None) -> list[Table]:
    """Return a list with a table of the modules' memory and shares at the peak, or [] if the peak is 0."""
    total = explanation.run.peak_allocated_bytes
    if not total:
        return []
    columns = (
        Column("By module at the peak", min_width=NAME_WIDTH),
        mib_column(),
        Column("share", is_number=True, min_width=6),
        Column("mostly"),
        Column(is_bar=True, rank=1),
    )
    shown = fold(explanation.modules, shown_depth(explanation, depth))
    return [Table(columns, list(_module_rows(shown, 0, total)))]


def shown_depth(explanation: Explanation, depth: int | None) -> int:
    """Return `depth` or, if it is None, the most levels of the module tree that fit in `MAX_LINES` lines."""
    if depth is not None:
        return depth
    modules, depth, lines = explanation.modules, 1, 0
    while True:
        deeper = fold(modules, depth + 1)
        count = len(list(_module_rows(deeper, 0, max(1, modules.size_bytes))))
        if count > MAX_LINES or count == lines or deeper == fold(modules, depth):
            return depth
        depth, lines = depth + 1, count


def _module_rows(share: ModuleShare, level: int, total: int) -> Iterator[tuple[Cell | str, ...]]:
    """Yield the table rows of the modules below `share` and of its own blocks, largest first.

    Small modules are merged into one row.
    """
    rows: list[tuple[int, ModuleShare | None]] = [(child.size_bytes, child) for child in share.children]
    if share.own_bytes and (level == 0 or share.children):
        rows.append((share.own_bytes, None))
    rows.sort(key=lambda row: -row[0])
    shown = [row for row in rows if row[0] >= MIN_SHARE * total]
    for size_bytes, child in shown:
        name = (OUTSIDE if level == 0 else "(itself)") if child is None else child.name.rpartition(".")[2]
        roles = _own_roles(share) if child is None else child.by_category
        category = max(roles, key=lambda category: roles[category])
        part = roles[category] / size_bytes
        mostly = str(category) if part > 0.995 else f"{category} {part:.0%}"
        yield _module_row(name, level, size_bytes / total, size_bytes, mostly, CATEGORY_COLOURS[category])
        if child is not None:
            yield from _module_rows(child, level + 1, total)
    rest = rows[len(shown) :]
    if rest:
        noun = "module" if len(rest) == 1 else "modules"
        size_bytes = sum(size for size, _ in rest)
        yield _module_row(f"({len(rest)} smaller {noun})", level, size_bytes / total, size_bytes)


def _module_row(
    name: str, level: int, share: float, size_bytes: int, mostly: str = "", colour: str = ""
) -> tuple[Cell | str, ...]:
    label = Cell(f"{'  ' * level}{name}", "" if level else "strong")
    bar = Cell("", colour=colour, share=share)
    return label, mib_text(size_bytes), f"{share:.1%}", Cell(mostly, "faint"), bar


def _own_roles(share: ModuleShare) -> dict[Category, int]:
    """Return the bytes of a module without its child modules, by category."""
    return {
        category: size_bytes - sum(child.by_category[category] for child in share.children)
        for category, size_bytes in share.by_category.items()
    }


# ---- blocks


def tensors_section(explanation: Explanation, top: int) -> list[Block]:
    """Return the section on the `top` largest blocks in use at the peak."""
    columns = (Column(is_number=True, min_width=LISTED_WIDTH), Column(min_width=11), Column())
    rows = tuple(map(_block_row, explanation.blocks[:top]))
    return [Paragraph(tensors_title(explanation), "strong"), Table(columns, rows, indent=0)]


def tensors_title(explanation: Explanation) -> str:
    """Return the title of the table of largest blocks."""
    return f"Largest of the {len(explanation.blocks):,} blocks in use at the peak"


def _block_row(block: LiveBlock) -> tuple[Cell | str, ...]:
    detail = block.detail
    source = "" if detail is None or not detail.source else f"{detail.source}  {detail.code}"
    return (
        f"{mib_text(block.size_bytes)} MiB",
        Cell(str(block.category), colour=CATEGORY_COLOURS[block.category]),
        Cell(_block_text(block), detail=source),
    )


def _block_text(block: LiveBlock) -> str:
    """Return text on a block's tensor and the operator, module, step and phase that requested it."""
    born = "" if block.phase is Phase.SETUP else f", step {block.step} {block.phase}"
    where = f" in {block.module}" if block.module else ""
    tensor = f"{held}  " if (held := tensor_text(block)) else ""
    return f"{tensor}{short_op(block.op)}{where}{born}"


def tensor_text(block: LiveBlock) -> str:
    """Return the shape and dtype of a block's tensor, such as `64x3x224x224 float32`, or "" if unknown."""
    detail = block.detail
    return "" if detail is None or not detail.dtype else f"{shape_text(detail.shape)} {detail.dtype}"


def block_to_json(block: LiveBlock) -> dict[str, Any]:
    """Return the JSON object of a block. Properties of the tensor are null if the trace lacks them."""
    fields = attributes(block.detail, "shape", "dtype", "source", "code")
    return {
        **attributes(block, "size_bytes", "requested_bytes", "category", "module", "op", "step", "phase"),
        "shape": fields["shape"] if fields["dtype"] else None,
        **{name: fields[name] or None for name in ("dtype", "source", "code")},
    }
