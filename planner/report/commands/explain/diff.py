"""Report the differences between a trace and a GPU's recording: unmatched blocks and other lifetimes."""

from dataclasses import dataclass
from typing import Any

from planner.allocator.history import Difference, Kind, LifetimeDifference, SidePeak
from planner.program import Phase
from planner.report.describe import short_op
from planner.report.document import Block, Bullets, Column, Entry, Paragraph, Table
from planner.report.units import NAME_WIDTH, attributes, figures_table, mib_column, mib_text, to_builtins

_MEANING = {
    Kind.WORKSPACE: "recorded, gone before the next block that both have",
    Kind.BLOCK: "recorded, lives on",
    Kind.TENSOR: "traced, not made on the GPU",
    Kind.SCRATCH: "traced as a kernel's scratch memory, not taken on the GPU",
}


@dataclass(frozen=True, slots=True)
class ExtraGroup:
    """Blocks of one phase, module, operator and size that only the trace or only the recording has."""

    kind: Kind
    phase: Phase
    module: str
    op: str
    size_bytes: int
    where: str
    steps: tuple[int, ...]  # the step of each block

    @property
    def bytes(self) -> int:
        """Return the sum of the blocks' bytes over all steps."""
        return self.size_bytes * len(self.steps)


def group_extras(difference: Difference) -> list[ExtraGroup]:
    """Return groups of equal unmatched blocks of all steps, the largest group first."""
    groups: dict[tuple[Kind, Phase, str, str, int, str], list[int]] = {}
    for extra in difference.extras:
        key = (extra.kind, extra.phase, extra.module, extra.op, extra.size_bytes, extra.where)
        groups.setdefault(key, []).append(extra.step)
    grouped = [ExtraGroup(*key, tuple(steps)) for key, steps in groups.items()]
    return sorted(grouped, key=lambda group: -group.bytes)  # stable: ties keep the order of the trace


def difference_sections(difference: Difference, top: int) -> list[list[Block]]:
    """Return the sections on the differences between a trace and a recording."""
    stretches = f"{difference.phases} stretch{'es' * (difference.phases != 1)}"
    aligned = (
        f"{difference.matched:,} blocks of {difference.traced_allocations:,} traced and "
        f"{difference.recorded_allocations:,} recorded ones, in {stretches}"
    )
    notes = (Entry("Note", note) for note in difference.notes)
    head: list[Block] = [Entry("Against", difference.about), *notes, Entry("Aligned", aligned)]
    sections: list[list[Block]] = [head, [_peaks(difference)]]
    if difference.is_empty:
        return [*sections, [Paragraph("Trace and recording are the same, block by block")]]
    if difference.extras:
        sections += [_extras(difference, top), _ops(difference, top)]
    if difference.lives:
        sections.append(_lives(difference, top))
    return sections


def _mib(size_bytes: int) -> str:
    return mib_text(size_bytes, 2)


def _peaks(difference: Difference) -> Table:
    sides = (("traced", difference.traced), ("recorded", difference.recorded))
    sizes = ((name, (one.allocated_bytes, one.reserved_bytes, one.alone_bytes)) for name, one in sides)
    return figures_table("Peaks in MiB", ("allocated", "reserved", "of it alone"), sizes, 2)


def _extras(difference: Difference, top: int) -> list[Block]:
    columns = (
        Column("Only one side has", min_width=NAME_WIDTH),
        mib_column("MiB each"),
        Column("times", is_number=True),
        Column("where"),
    )
    groups, rows = group_extras(difference), []
    missing = [group for group in groups if group.kind is Kind.TENSOR and group.phase is Phase.SETUP]
    if missing:  # a late recording lacks all blocks of the model, which need no row each
        count = sum(len(group.steps) for group in missing)
        why = f"{count:,} blocks of the model as it is placed on the GPU: did the recording begin after that?"
        rows.append((str(Kind.TENSOR), _mib(sum(group.bytes for group in missing)), "in all", why))
        groups = [group for group in groups if group not in missing]
    rows += map(_extra_row, groups[:top])
    kinds = dict.fromkeys(group.kind for group in groups[:top])
    blocks: list[Block] = [Table(columns, tuple(rows))]
    if len(groups) > top:
        rest = _mib(sum(group.bytes for group in groups[top:]))
        blocks.append(Paragraph(f"and {len(groups) - top:,} more, {rest} MiB in all; --top shows them"))
    return [*blocks, Bullets("", tuple(f"{kind}: {_MEANING[kind]}" for kind in kinds))]


def _extra_row(group: ExtraGroup) -> tuple[str, str, str, str]:
    place = f"{group.phase}, {short_op(group.op)}" + (f" in {group.module}" if group.module else "")
    code = f" ({group.where})" if group.where else ""
    where = f"{place}, {_steps(group.steps)}{code}"
    return str(group.kind), _mib(group.size_bytes), str(len(group.steps)), where


def _steps(steps: tuple[int, ...]) -> str:
    """Return step numbers as text, such as `steps 1 to 3`."""
    numbers = sorted(set(steps))
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"steps {', '.join(map(str, numbers))}"


def _ops(difference: Difference, top: int) -> list[Block]:
    counts = (Column(title, is_number=True) for title in ("both", "traced only", "recorded only"))
    columns = (Column("By operator", min_width=NAME_WIDTH), *counts)

    def cell(count: int, size_bytes: int) -> str:
        return f"{count:,} ({_mib(size_bytes)} MiB)" if count else ""

    rows = [row for row in difference.ops if row.traced_only or row.recorded_only]
    shown = tuple(
        (
            short_op(row.op) or "(none)",
            f"{row.matched:,}",
            cell(row.traced_only, row.traced_only_bytes),
            cell(row.recorded_only, row.recorded_only_bytes),
        )
        for row in rows[:top]
    )
    more = [Paragraph(f"and {len(rows) - top} more operators")] if len(rows) > top else []
    return [Table(columns, shown), *more]


def _lives(difference: Difference, top: int) -> list[Block]:
    columns = (Column("Blocks that die at another time", min_width=NAME_WIDTH), mib_column(), Column("where"))
    lives = _largest_lives(difference)
    table = Table(columns, tuple(("", _mib(life.size_bytes), _life(life)) for life in lives[:top]))
    return [table, *([Paragraph(f"and {len(lives) - top:,} more")] if len(lives) > top else [])]


def _largest_lives(difference: Difference) -> list[LifetimeDifference]:
    return sorted(difference.lives, key=lambda life: -life.size_bytes)


def _life(life: LifetimeDifference) -> str:
    place = f"{short_op(life.op)}" + (f" in {life.module}" if life.module else "")
    births = f"{abs(life.later)} birth{'s' * (abs(life.later) != 1)}"
    when = "later" if life.later > 0 else "earlier"
    return f"step {life.step} {life.phase}, {place}: recorded dies {births} {when}"


def difference_to_json(difference: Difference, top: int) -> dict[str, Any]:
    """Return the JSON object of the difference between a trace and a recording.

    It has the `top` largest groups of unmatched blocks, the `top` largest blocks with different lifetimes,
    and all operators.
    """
    groups = group_extras(difference)
    return {
        **attributes(difference, "about", "notes"),
        "same": difference.is_empty,
        "traced": _side(difference.traced_allocations, difference.traced),
        "recorded": _side(difference.recorded_allocations, difference.recorded),
        "matched": difference.matched,
        "stretches": difference.phases,
        "only_one_side": to_builtins(groups[:top]),
        "groups": len(groups),
        **attributes(difference, "ops"),
        "other_lives": to_builtins(_largest_lives(difference)[:top]),
        "other_lives_in_all": len(difference.lives),
    }


def _side(births: int, peak: SidePeak) -> dict[str, int]:
    return {"blocks": births, **{f"peak_{name}": value for name, value in to_builtins(peak).items()}}
