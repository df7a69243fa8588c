"""Format the numbers of reports: the breakdown of a process, sizes in MiB, and probabilities."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from planner._support.printable import harmless_cell
from planner.hardware import MIB, UNLIMITED_BYTES, SourcedBytes
from planner.jobs import Size
from planner.planning import Estimate
from planner.program import LARGEST_BATCH, Category
from planner.report.document import Cell, Column, Paragraph, Table

SCHEMA = 1  # version of every JSON object
DIGITS = 1  # decimals of MiB in texts
NAME_WIDTH = 28  # width of a table's first column, so that tables align
FIGURE_WIDTH = 10


def breakdown(estimate: Estimate) -> dict[str, int]:
    """Return the bytes of each part of the process's memory, by the part's name.

    They add up to `process_bytes`. The parts are the context, NCCL if it takes memory, the categories, and
    fragmentation. Tensors and workspaces are counted at the allocated peak. `fragmentation` is the reserved
    peak minus the allocated peak. Memory that a calibration adds counts as workspaces, which the replay does
    not know; memory that a calibration removes is taken from the fragmentation, then from the context.
    """
    run = estimate.run
    device = estimate.budget.device
    context, nccl = device.context.value, 0 if device.nccl is None else device.nccl.value
    fragmentation = run.peak_reserved_bytes - run.peak_allocated_bytes
    change = estimate.process_bytes - context - nccl - run.peak_reserved_bytes
    less_fragmentation = min(max(0, -change), fragmentation)
    parts = {
        "context": context + min(0, change) + less_fragmentation,
        **({"nccl": nccl} if nccl else {}),
        **{category.value: size_bytes for category, size_bytes in estimate.at_peak.items()},
        "fragmentation": fragmentation - less_fragmentation,
    }
    parts[Category.WORKSPACE.value] += max(0, change)
    return parts


def mib(size_bytes: float, digits: int = 3) -> float:
    """Return a number of bytes in MiB, rounded to `digits` decimals."""
    return round(size_bytes / MIB, digits)


def mib_text(size_bytes: float, digits: int = DIGITS) -> str:
    """Return a number of bytes in MiB as text, such as `1,234.5`."""
    return f"{mib(size_bytes, digits):,.{digits}f}"


def mib_parts(parts: Mapping[str, int], digits: int = 3) -> dict[str, float]:
    """Return sizes in MiB, rounded so that they add up to the rounded sum."""
    rounded: dict[str, float] = {}
    sum_bytes, before = 0, 0.0
    for name, size_bytes in parts.items():
        sum_bytes += size_bytes
        now = mib(sum_bytes, digits)
        rounded[name] = round(now - before, digits)
        before = now
    return rounded


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Return the attributes `names` of `value` for JSON, by name.

    All are None if `value` is None. A name such as `x_mib` stands for the attribute `x_bytes` in MiB.
    """
    return {name: None if value is None else _attribute(value, name) for name in names}


def _attribute(value: object, name: str) -> Any:
    if not name.endswith("_mib"):
        return to_builtins(getattr(value, name))
    size_bytes = getattr(value, f"{name.removesuffix('_mib')}_bytes")
    return None if size_bytes is None else mib(size_bytes)


def with_mib(value: object) -> dict[str, Any] | None:
    """Return the fields of `value` for JSON, with bytes converted to MiB, or None if `value` is None.

    Sizes come last.
    """
    names = [] if value is None else list(to_builtins(value))
    sizes = [name for name in names if name.endswith("_bytes")]
    others = [name for name in names if name not in sizes]
    return attributes(value, *others, *(f"{name.removesuffix('_bytes')}_mib" for name in sizes)) or None


def memory_table(title: str, rows: Iterable[tuple[str, float, str]], name_width: int = NAME_WIDTH) -> Table:
    """Return a table with columns for names, MiB and remarks; the sizes in `rows` are in bytes."""
    columns = (Column(title, min_width=name_width), mib_column(), Column())
    sizes = ((name, Cell(mib_text(size), "strong"), Cell(remark, "faint")) for name, size, remark in rows)
    return Table(columns, tuple(sizes))


def figures_table(
    title: str, names: Iterable[str], rows: Iterable[tuple[str, Iterable[float]]], digits: int = DIGITS
) -> Table:
    """Return a table with a column for names and columns of sizes, converted from bytes to MiB.

    `names` are the titles of the columns in MiB.
    """
    columns = [Column(title, min_width=NAME_WIDTH), *map(mib_column, names)]
    return Table(columns, [(name, *(mib_text(size, digits) for size in sizes)) for name, sizes in rows])


def mib_column(title: str = "MiB") -> Column:
    """Return a column of numbers that is at least `FIGURE_WIDTH` characters wide."""
    return Column(title, is_number=True, min_width=FIGURE_WIDTH)


def is_endless(figure: SourcedBytes) -> bool:
    """Return whether a memory size is at least `UNLIMITED_BYTES`, which stands for unlimited memory."""
    return figure.value >= UNLIMITED_BYTES


def signed_percent(share: float) -> str:
    """Return a relative error as text such as `+6.3%`. Zero has no sign."""
    text = f"{share:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def probability_text(probability: float) -> str:
    """Return a probability as text in percent.

    It has one decimal below 10 % and above 90 %.

    >>> probability_text(0.00004), probability_text(0.0123), probability_text(0.62), probability_text(0.9999)
    ('below 0.1 %', '1.2 %', '62 %', 'above 99.9 %')
    """
    percent = 100 * probability
    if percent < 0.1:
        return "below 0.1 %"
    if percent > 99.9:
        return "above 99.9 %"
    return f"{percent:.0f} %" if 10 <= percent <= 90 else f"{percent:.1f} %"


def timing_line(**parts: float) -> Paragraph:
    """Return a line with the total time and the seconds of each activity."""
    spent = ", ".join(f"{seconds:.1f} s {doing}" for doing, seconds in parts.items())
    return Paragraph(f"Took {sum(parts.values()):.1f} s: {spent}", "faint")


def batch_text(batch: int) -> str:
    """Return a largest batch size as text: `none` for 0, `any` if memory does not limit the batch."""
    return "any" if batch >= LARGEST_BATCH else f"{batch:,}" if batch else "none"


def csv_text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header, with texts escaped that a spreadsheet would take for formulas."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: harmless_cell(cell) for name, cell in row.items()} for row in rows)
    return text.getvalue()


def to_builtins(value: object) -> Any:
    """Convert an object to the dicts, lists, strings and numbers of JSON."""
    from msgspec import json  # imported late: no text report needs it

    return json.decode(json.encode(value))


def sides_text(size: Size) -> str:
    """Return a sample's size as text, such as `512x512`."""
    return "x".join(map(str, size))
