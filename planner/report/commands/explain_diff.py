"""The text of `planner explain --against`: what only the trace has, and what only the GPU's allocator did."""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.allocator.history import Difference, Extra, Kind, LifeDifference
from planner.program import Phase
from planner.report.assumptions import short_op
from planner.report.layout import NAMES, entry, wrapped
from planner.report.units import mib

_MEANING = {
    Kind.WORKSPACE: "recorded, gone before the next block that both have",
    Kind.BLOCK: "recorded, lives on",
    Kind.TENSOR: "traced, not made on the GPU",
    Kind.SCRATCH: "traced as a kernel's scratch memory, not taken on the GPU",
}


@dataclass(frozen=True, slots=True)
class ExtraGroup:
    """Equal blocks that only one side has, at one place of the loop."""

    kind: Kind
    phase: Phase
    module: str
    op: str
    size_bytes: int
    where: str
    steps: tuple[int, ...]  # one entry for each block

    @property
    def bytes(self) -> int:
        """Of all steps."""
        return self.size_bytes * len(self.steps)


def group_extras(difference: Difference) -> list[ExtraGroup]:
    """Extras that repeat step by step in one entry, the largest sum first."""
    groups: dict[tuple[Kind, Phase, str, str, int, str], list[int]] = {}
    for extra in difference.extras:
        groups.setdefault(_key(extra), []).append(extra.step)
    found = [ExtraGroup(*key, tuple(steps)) for key, steps in groups.items()]
    found.sort(key=lambda group: -group.bytes)  # stable: else in the order of the trace
    return found


def _key(extra: Extra) -> tuple[Kind, Phase, str, str, int, str]:
    return extra.kind, extra.phase, extra.module, extra.op, extra.size_bytes, extra.where


def difference_lines(difference: Difference, top: int) -> list[str]:
    """The section on a recording."""
    lines = [
        *entry("Against", difference.about),
        *(line for note in difference.notes for line in wrapped("  note: ", note)),
        *entry("Aligned", _aligned(difference)),
        "",
        *_peaks(difference),
    ]
    if difference.is_empty:
        return [*lines, "", "Trace and recording are the same, block by block"]
    if difference.extras:
        lines += ["", *_extras(difference, top), "", *_ops(difference, top)]
    if difference.lives:
        lines += ["", *_lives(difference, top)]
    return lines


def _aligned(difference: Difference) -> str:
    return (
        f"{difference.matched:,} blocks of {difference.traced_births:,} traced and "
        f"{difference.recorded_births:,} recorded ones, in {difference.phases} "
        f"stretch{'es' * (difference.phases != 1)}"
    )


def _mib(size_bytes: int) -> str:
    return f"{mib(size_bytes, 2):,.2f}"


def _peaks(difference: Difference) -> Iterator[str]:
    yield f"{'Peaks in MiB':<{NAMES + 2}}{'allocated':>12}{'reserved':>12}{'of it alone':>13}"
    for name, side in (("traced", difference.traced), ("recorded", difference.recorded)):
        figures = (
            f"{_mib(side.allocated_bytes):>12}{_mib(side.reserved_bytes):>12}{_mib(side.alone_bytes):>13}"
        )
        yield f"  {name:<{NAMES}}{figures}"


def _extras(difference: Difference, top: int) -> Iterator[str]:
    yield f"{'Only one side has':<{NAMES + 2}}{'MiB each':>12}  times  where"
    groups = group_extras(difference)
    missing = [group for group in groups if group.kind is Kind.TENSOR and group.phase is Phase.SETUP]
    if missing:  # of a recording that began late these are all, and of no interest one by one
        yield from wrapped(
            f"  {Kind.TENSOR:<{NAMES}}{_mib(sum(group.bytes for group in missing)):>12}  in all  ",
            f"{sum(len(group.steps) for group in missing):,} blocks of the model as it is placed on the GPU: "
            "did the recording begin after that?",
        )
        groups = [group for group in groups if group not in missing]
    for group in groups[:top]:
        place = f"{group.phase}, {short_op(group.op)}" + (f" in {group.module}" if group.module else "")
        code = f" ({group.where})" if group.where else ""
        yield from wrapped(
            f"  {group.kind:<{NAMES}}{_mib(group.size_bytes):>12}  {len(group.steps):>5}  ",
            f"{place}, {_steps(group.steps)}{code}",
        )
    if len(groups) > top:
        rest = sum(group.bytes for group in groups[top:])
        yield f"  and {len(groups) - top:,} more, {_mib(rest)} MiB in all; --top shows them"
    for kind in dict.fromkeys(group.kind for group in groups[:top]):
        yield f"  {kind}: {_MEANING[kind]}"


def _steps(steps: tuple[int, ...]) -> str:
    """`steps 1 to 3`."""
    known = sorted(set(steps))
    if len(known) == 1:
        return f"step {known[0]}"
    if known == list(range(known[0], known[-1] + 1)):
        return f"steps {known[0]} to {known[-1]}"
    return f"steps {', '.join(map(str, known))}"


def _ops(difference: Difference, top: int) -> Iterator[str]:
    yield f"{'By operator':<{NAMES + 14}}{'both':>8}{'traced only':>22}{'recorded only':>22}"
    rows = [row for row in difference.ops if row.traced_only or row.recorded_only]
    for row in rows[:top]:
        traced = f"{row.traced_only:,} ({_mib(row.traced_only_bytes)} MiB)" if row.traced_only else ""
        recorded = f"{row.recorded_only:,} ({_mib(row.recorded_only_bytes)} MiB)" if row.recorded_only else ""
        yield f"  {short_op(row.op) or '(none)':<{NAMES + 12}}{row.matched:>8,}{traced:>22}{recorded:>22}"
    if len(rows) > top:
        yield f"  and {len(rows) - top} more operators"


def _lives(difference: Difference, top: int) -> Iterator[str]:
    yield f"{'Blocks that die at another time':<{NAMES + 2}} {'MiB':>6}  where"
    lives = sorted(difference.lives, key=lambda life: -life.size_bytes)
    for life in lives[:top]:
        yield from wrapped(f"  {'':<{NAMES}}{_mib(life.size_bytes):>12}  ", _life(life))
    if len(lives) > top:
        yield f"  and {len(lives) - top:,} more"


def _life(life: LifeDifference) -> str:
    place = f"{short_op(life.op)}" + (f" in {life.module}" if life.module else "")
    births = f"{abs(life.later)} birth{'s' * (abs(life.later) != 1)}"
    when = "later" if life.later > 0 else "earlier"
    return f"step {life.step} {life.phase}, {place}: recorded dies {births} {when}"
