"""The first difference between a trace and the recorded history of the same job.

Both sides are rows of allocations (`planner.allocator.history.lifetimes`). They part at the first of another
size, or before which other blocks were freed. `planner.allocator.history.diff` names its operator and its
cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.allocator.history.diff import Difference, Kind, UnmatchedBlock, compare_with_recording
from planner.allocator.history.lifetimes import Allocation, Recording, allocations_of
from planner.program.events import Site, Trace

_CONVOLUTION = ("convolution", "cudnn")
_PRODUCT = ("mm", "addmm", "bmm", "baddbmm", "linear", "addmv", "matmul", "dot", "mv")


@dataclass(frozen=True, slots=True)
class Parting:
    """The first event that differs, its cause, and all causes with their counts."""

    cause: str
    place: str  # step, phase, operator, module
    what: str  # sizes on both sides
    causes: dict[str, int]


def find_parting(trace: Trace, recording: Recording) -> Parting | None:
    """Return the first difference of the events; None if there is none."""
    traced = allocations_of(trace.events, trace.sites, recording.config)
    recorded = allocations_of(recording.events, recording.sites, recording.config)
    at = _first_difference(traced, recorded)
    if at is None:
        return None
    difference = compare_with_recording(trace, recording)
    causes = _count_causes(difference)
    ours, theirs = _at(traced, at), _at(recorded, at)
    if ours is not None and theirs is not None and ours.size_bytes == theirs.size_bytes:
        return _other_deaths(traced, recorded, at, causes)
    extra = _first_extra(difference, at)
    sizes = f"planner {_size(ours)}, emulated {_size(theirs)}"
    if extra is None:
        near = ours or traced[-1]
        return Parting(f"order: {_short(near.site.op)}", _place(near), sizes, causes)
    what = f"{extra.kind} of {extra.size_bytes:,} bytes; event {at}: {sizes}"
    return Parting(_cause_of(extra), _place(extra), what, causes)


def _first_difference(traced: Sequence[Allocation], recorded: Sequence[Allocation]) -> int | None:
    deaths = _deaths(traced), _deaths(recorded)
    for index in range(max(len(traced), len(recorded))):
        ours, theirs = _at(traced, index), _at(recorded, index)
        if ours is None or theirs is None or ours.size_bytes != theirs.size_bytes:
            return index
        if deaths[0].get(index) != deaths[1].get(index):
            return index
    return None


def _deaths(births: Sequence[Allocation]) -> dict[int, set[int]]:
    """Return the births that are over before the birth of each index."""
    deaths: dict[int, set[int]] = {}
    for index, birth in enumerate(births):
        if birth.freed is not None:
            deaths.setdefault(birth.freed, set()).add(index)
    return deaths


def _other_deaths(
    traced: Sequence[Allocation], recorded: Sequence[Allocation], at: int, causes: dict[str, int]
) -> Parting:
    ours, theirs = _deaths(traced).get(at, set()), _deaths(recorded).get(at, set())
    block = min(ours ^ theirs)
    birth = traced[block]
    later = "later" if block in ours else "earlier"
    by = traced[at - 1] if at else birth
    what = (
        f"the block of {birth.size_bytes:,} bytes of {_short(birth.site.op)} in "
        f"{birth.site.module or 'the loop'} dies {later} in the emulated run than before event {at}"
    )
    return Parting(f"lifetime: {_short(birth.site.op)}", _place(by), what, causes)


def _first_extra(difference: Difference, at: int) -> UnmatchedBlock | None:
    """Return the first block that one side has alone, unless that lies well behind the event."""
    near = [extra for extra in difference.extras if extra.birth >= at]
    return min(near, key=lambda extra: extra.birth, default=None)


def _count_causes(difference: Difference) -> dict[str, int]:
    causes = [_cause_of(extra) for extra in difference.extras]
    causes += [f"lifetime: {_short(life.op)}" for life in difference.lives]
    counts = {cause: causes.count(cause) for cause in dict.fromkeys(causes)}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _cause_of(extra: UnmatchedBlock) -> str:
    op = _short(extra.op)
    if extra.kind in (Kind.TENSOR, Kind.BLOCK):
        return f"tensor: {op}"
    if any(word in op for word in _CONVOLUTION):
        return f"workspace of convolution: {op}"
    if op.split(".")[0] in _PRODUCT:
        return f"workspace of cuBLAS: {op}"
    if "attention" in op:
        return f"workspace of attention: {op}"
    return f"workspace: {op}"


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default") or "(none)"


def _place(block: Allocation | UnmatchedBlock) -> str:
    site = Site(block.module, block.op) if isinstance(block, UnmatchedBlock) else block.site
    return f"step {block.step}, {block.phase}, {_short(site.op)}" + (
        f", {site.module}" if site.module else ""
    )


def _at(births: Sequence[Allocation], index: int) -> Allocation | None:
    return births[index] if index < len(births) else None


def _size(birth: Allocation | None) -> str:
    return "nothing" if birth is None else f"{birth.size_bytes:,} bytes"
