"""The part of docs/exactness.md on capabilities."""

from collections.abc import Iterator

from benchmarks.emulated.capabilities.case import Capability
from benchmarks.emulated.capabilities.registry import HERE, capability_names, load_capability
from benchmarks.emulated.rows import Row
from benchmarks.rows import read_rows

ALLOCATED_BAR, RESERVED_BAR = 0.001, 0.01
HEAD = f"""\
## What people train beside the catalogue

Chosen jobs, each run by the static planner and on an emulated GPU. Where the emulated side is a script, it
runs as its author would run it, without the planner's loop. The bars are {ALLOCATED_BAR:.1%} of allocated and
{RESERVED_BAR:.0%} of reserved memory.
"""


def capability_parts() -> Iterator[str]:
    """Yield the paragraphs and tables of all capabilities that have rows."""
    found = {
        name: (load_capability(name), read_rows(HERE / f"{name}.csv", Row)) for name in capability_names()
    }
    with_rows = {name: both for name, both in found.items() if both[1]}
    if not with_rows:
        return
    yield HEAD
    yield "\n".join(_summary(with_rows))
    for name, (capability, rows) in with_rows.items():
        outside = [row for row in rows if row.failure or not is_within_bars(row)]
        if outside:
            yield f"### Outside the bars: {name.replace('_', ' ')}"
            yield "\n".join(_outside(capability, outside))


def is_within_bars(row: Row) -> bool:
    """Return whether a row that ran on both sides meets both bars."""
    allocated, reserved = _errors(row)
    return abs(allocated) <= ALLOCATED_BAR and abs(reserved) <= RESERVED_BAR


def _errors(row: Row) -> tuple[float, float]:
    return (
        row.planned_allocated / max(row.emulated_allocated, 1) - 1,
        row.planned_reserved / max(row.emulated_reserved, 1) - 1,
    )


def _summary(found: dict[str, tuple[Capability, list[Row]]]) -> Iterator[str]:
    yield "| capability | ran | identical | within the bars | worst allocated | worst reserved |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, (capability, rows) in found.items():
        ran = [row for row in rows if not row.failure]
        same = sum(row.allocated_is_same and row.reserved_is_same for row in ran)
        within = sum(map(is_within_bars, ran))
        worst = [max((_errors(row)[side] for row in ran), key=abs, default=0.0) for side in (0, 1)]
        yield (
            f"| {name.replace('_', ' ')}: {capability.about} | {len(ran)} of {len(rows)} | {same} | {within} "
            f"| {worst[0]:+.2%} | {worst[1]:+.2%} |"
        )


def _outside(capability: Capability, rows: list[Row]) -> Iterator[str]:
    yield "| job | allocated | reserved | cause |"
    yield "|---|--:|--:|---|"
    for row in rows:
        job = f"{row.number}, `{row.model}` at {row.batch} on {row.gpu} `{row.options}`"
        cause = (
            capability.causes.get(row.number) or row.failure or "; ".join((row.cause, row.place, row.what))
        )
        errors = ("", "") if row.failure else tuple(f"{error:+.2%}" for error in _errors(row))
        yield f"| {job} | {errors[0]} | {errors[1]} | {' '.join(cause.split()).replace('|', '/')} |"
