"""The peak by module."""

from collections.abc import Iterator

from planner.planning import Explanation, ModuleShare, fold
from planner.program import Category
from planner.report.document import Cell, Column, Table
from planner.report.plots.colours import CATEGORY_COLOURS
from planner.report.units import NAME_WIDTH, mib_column, mib_text

MIN_SHARE = 0.005  # of the peak: modules below it are summed up in one line
MAX_LINES = 30  # as many levels of modules are shown as these hold, unless the user says how many
OUTSIDE = "(outside of modules)"


def modules_tables(explanation: Explanation, depth: int | None) -> list[Table]:
    """Return the tree of modules with shares of the allocated peak and what each holds most of."""
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
    return [Table(columns, list(_rows(shown, 0, total)))]


def shown_depth(explanation: Explanation, depth: int | None) -> int:
    """Return how many levels of modules are shown: as given, or as can be read; at least 1."""
    if depth is not None:
        return depth
    modules, depth, lines = explanation.modules, 1, 0
    while True:
        deeper = fold(modules, depth + 1)
        count = len(list(_rows(deeper, 0, max(1, modules.size_bytes))))
        if count > MAX_LINES or count == lines or deeper == fold(modules, depth):
            return depth
        depth, lines = depth + 1, count


def _rows(share: ModuleShare, level: int, total: int) -> Iterator[tuple[Cell | str, ...]]:
    """Yield the modules below `share` and what is its own, the larger ones first, the smallest summed up."""
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
        yield _row(name, level, size_bytes / total, size_bytes, mostly, CATEGORY_COLOURS[category])
        if child is not None:
            yield from _rows(child, level + 1, total)
    rest = rows[len(shown) :]
    if rest:
        noun = "module" if len(rest) == 1 else "modules"
        size_bytes = sum(size for size, _ in rest)
        yield _row(f"({len(rest)} smaller {noun})", level, size_bytes / total, size_bytes)


def _row(
    name: str, level: int, share: float, size_bytes: int, mostly: str = "", colour: str = ""
) -> tuple[Cell | str, ...]:
    label = Cell(f"{'  ' * level}{name}", "" if level else "strong")
    bar = Cell("", colour=colour, share=share)
    return label, mib_text(size_bytes), f"{share:.1%}", Cell(mostly, "faint"), bar


def _own_roles(share: ModuleShare) -> dict[Category, int]:
    """Return what a module holds without its children, by category."""
    return {
        category: size_bytes - sum(child.by_category[category] for child in share.children)
        for category, size_bytes in share.by_category.items()
    }
