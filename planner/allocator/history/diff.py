"""Compare a trace with a GPU's recorded allocations, and list the blocks without a partner.

Both sides are sequences of allocations. They are cut at the starts of phases that both know and aligned by
the rounded sizes of the blocks. A block without a partner is listed with the operator during or next to which
it was allocated.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator.config import AllocatorConfig, MemoryLimits
from planner.allocator.history.lcs import Pair, align_rows
from planner.allocator.history.lifetimes import (
    Allocation,
    Recording,
    allocations_of,
    common_lifetimes,
    common_phase_starts,
)
from planner.allocator.replay import Replay, replay_trace
from planner.program import Alloc, Category, Phase, Trace


class Kind(StrEnum):
    """The kinds of blocks that only the trace or only the recording has."""

    WORKSPACE = "workspace"  # recorded only; freed before the next matched block is allocated
    BLOCK = "block"  # recorded only; freed later
    TENSOR = "tensor"  # traced only
    SCRATCH = "scratch"  # traced only; a workspace, computed by a workspace rule


class UnmatchedBlock(Struct, frozen=True):
    """A block that only the trace or only the recording has.

    A recorded block has the module and operator of the preceding matched traced block, or of the following
    matched block if a block was freed in between, since an operator had ended.
    """

    kind: Kind
    birth: int  # index among the allocations on its side
    size_bytes: int  # rounded
    step: int
    phase: Phase
    module: str
    op: str
    where: str  # the code that allocated a recorded block; empty for a traced block
    at_peak: bool  # whether the block is in use at the allocated peak of its side


class LifetimeDifference(Struct, frozen=True):
    """A matched block that the trace and the recording free at different times."""

    birth: int  # index among the traced allocations
    size_bytes: int
    step: int
    phase: Phase
    module: str
    op: str
    later: int  # number of matched allocations by which the recording frees the block later


class OpTotal(Struct, frozen=True):
    """The counts and bytes of an operator's matched and unmatched blocks."""

    op: str
    matched: int
    matched_bytes: int
    traced_only: int
    traced_only_bytes: int
    recorded_only: int
    recorded_only_bytes: int


class SidePeak(Struct, frozen=True):
    """The peaks of a trace or a recording: allocated, reserved, and unmatched bytes at the allocated peak."""

    allocated_bytes: int
    reserved_bytes: int
    alone_bytes: int


class Difference(Struct, frozen=True):
    """The unmatched blocks, lifetime differences, totals and peaks of a trace and a recording."""

    about: str
    traced_allocations: int
    recorded_allocations: int
    matched: int
    phases: int  # number of stretches that were aligned separately
    extras: tuple[UnmatchedBlock, ...]  # the unmatched blocks of both sides, in order of the trace
    lives: tuple[LifetimeDifference, ...]
    ops: tuple[OpTotal, ...]  # in descending order of unmatched bytes
    traced: SidePeak
    recorded: SidePeak
    notes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Return whether both sides have the same blocks with the same lifetimes."""
        return not self.extras and not self.lives


def compare_with_recording(trace: Trace, recording: Recording) -> Difference:
    """Align a trace with a recording of the same job and batch size, and return all differences."""
    config = recording.config
    traced = allocations_of(trace.events, trace.sites, config)
    recorded = allocations_of(recording.events, recording.sites, config)
    cuts = common_phase_starts(trace.events, recording.events, (len(traced), len(recorded)))
    pairs: list[Pair] = []
    for (t0, r0), (t1, r1) in pairwise(cuts):
        sizes = [one.size_bytes for one in traced[t0:t1]], [one.size_bytes for one in recorded[r0:r1]]
        pairs += [(one + t0, other + r0) for one, other in align_rows(*sizes)]
    pairs = _prefer_equal_lifetimes(traced, recorded, pairs)
    recorded = list(_name_recorded(traced, recorded, pairs, cuts))
    (traced_run, traced_at), (run, recorded_at) = (_peak(side, config) for side in (trace, recording))
    extras = tuple(_extras(traced, recorded, pairs, cuts, (traced_at, recorded_at)))
    alone = [
        sum(extra.size_bytes for extra in extras if extra.at_peak and _is_traced(extra) is side)
        for side in (True, False)
    ]
    allocated, reserved = recording.peak_allocated_bytes, recording.peak_reserved_bytes
    return Difference(
        recording.about,
        len(traced),
        len(recorded),
        len(pairs),
        len(cuts) - 1,
        extras,
        tuple(_lifetime_differences(traced, recorded, pairs)),
        _op_totals(traced, pairs, extras),
        SidePeak(traced_run.peak_allocated_bytes, traced_run.peak_reserved_bytes, alone[0]),
        SidePeak(
            run.peak_allocated_bytes if allocated is None else allocated,
            run.peak_reserved_bytes if reserved is None else reserved,
            alone[1],
        ),
        recording.notes,
    )


def _peak(side: Trace | Recording, config: AllocatorConfig) -> tuple[Replay, int]:
    """Replay a trace or recording without limits, and return the replay and the index of its peak allocation.

    The index is the number of allocations before the allocation that reaches the allocated peak.
    """
    limits = MemoryLimits(config=replace(config, per_process_memory_fraction=1.0))
    run = replay_trace(Trace(side.events, side.sites, batch=1), limits)
    return run, sum(isinstance(event, Alloc) for event in side.events[: run.peak_event])


# ---- lifetimes


def _prefer_equal_lifetimes(
    traced: Sequence[Allocation], recorded: Sequence[Allocation], pairs: Sequence[Pair]
) -> list[Pair]:
    """Replace a pair's block by an unmatched neighbour of equal size with the other block's lifetime.

    A pair stays if the lifetimes of its own blocks are equal. A kernel's workspace may be as large as its
    result; the two are freed at different times.
    """
    pairs = list(pairs)
    for side, row in enumerate((traced, recorded)):
        lifetimes = _lifetimes(traced, recorded, pairs)
        taken = {pair[side]: place for place, pair in enumerate(pairs)}
        rising = sorted(taken)
        for index, one in enumerate(row):
            if index in taken:
                continue
            behind = bisect_left(rising, index)
            for near in rising[max(0, behind - 1) : behind + 1]:
                place = taken[near]
                if row[near].size_bytes != one.size_bytes:
                    continue
                pair = pairs[place]
                lifetime = lifetimes[1 - side][pair[1 - side]]
                if lifetimes[side][near] != lifetime and lifetimes[side][index] == lifetime:
                    pairs[place] = (index, pair[1]) if side == 0 else (pair[0], index)
                    taken[index] = taken.pop(near)
                    rising[bisect_left(rising, near)] = index  # no paired block is between the two
                    break
    return pairs


def _lifetimes(
    traced: Sequence[Allocation], recorded: Sequence[Allocation], pairs: Sequence[Pair]
) -> tuple[list[int], list[int]]:
    ours, theirs = {one for one, _ in pairs}, {other for _, other in pairs}
    return common_lifetimes(traced, ours), common_lifetimes(recorded, theirs)


def _lifetime_differences(
    traced: Sequence[Allocation], recorded: Sequence[Allocation], pairs: Sequence[Pair]
) -> Iterator[LifetimeDifference]:
    ours, theirs = _lifetimes(traced, recorded, pairs)
    for index, other in pairs:
        later = theirs[other] - ours[index]
        if later:
            one = traced[index]
            place = (one.step, one.phase, one.site.module, one.site.op)
            yield LifetimeDifference(index, one.size_bytes, *place, later)


# ---- blocks that only one side has


def _name_recorded(
    traced: Sequence[Allocation],
    recorded: Sequence[Allocation],
    pairs: Sequence[Pair],
    cuts: Sequence[Pair],
) -> Iterator[Allocation]:
    """Yield the recorded allocations with step, phase and site of the matched or a near traced allocation."""
    partner = {other: one for one, other in pairs}
    ends = {recorded[other].freed for other in partner}
    for (t0, r0), (_, r1) in pairwise(cuts):
        following = _next_partners(partner, r0, r1)
        last: int | None = None
        ended = False
        for index in range(r0, r1):
            ended = ended or (index > r0 and index in ends)
            one = partner.get(index)
            if one is not None:
                last, ended = one, False
            else:
                one = following[index - r0] if last is None or ended else last
                one = last if one is None else one
                one = min(t0, len(traced) - 1) if one is None else one
            site = recorded[index].site
            named = replace(recorded[index], where=f"{site.module} {site.op}".strip()[:200])
            if 0 <= one < len(traced):
                like = traced[one]
                named = replace(named, step=like.step, phase=like.phase, site=like.site)
            yield named


def _next_partners(partner: dict[int, int], start: int, end: int) -> list[int | None]:
    """Return the traced partner of the next matched allocation, for each recorded allocation.

    The recorded allocations are at the indices from `start` to `end` - 1. A partner is an index of a traced
    allocation, or None if no matched allocation follows before `end`.
    """
    partners: list[int | None] = []
    following: int | None = None
    for index in range(end - 1, start - 1, -1):
        partners.append(following)
        following = partner.get(index, following)
    return partners[::-1]


def _extras(
    traced: Sequence[Allocation],
    recorded: Sequence[Allocation],
    pairs: Sequence[Pair],
    cuts: Sequence[Pair],
    peaks: tuple[int, int],
) -> Iterator[UnmatchedBlock]:
    """Yield the unmatched blocks of both sides in order of allocation.

    Between two pairs, recorded blocks come before traced blocks.
    """
    lifetimes = common_lifetimes(recorded, {other for _, other in pairs})
    before, matched = (0, 0), 0
    # A cut comes before the pair that begins there, so that its phase's extras stay in that phase.
    stops = sorted([*((cut, 0) for cut in cuts[1:]), *((pair, 1) for pair in pairs)])
    for (one, other), step in stops:
        for index in range(before[1], other):
            is_brief = lifetimes[index] == matched and recorded[index].freed is not None
            yield _extra(Kind.WORKSPACE if is_brief else Kind.BLOCK, index, recorded[index], peaks[1])
        for index in range(before[0], one):
            is_scratch = traced[index].category is Category.WORKSPACE
            yield _extra(Kind.SCRATCH if is_scratch else Kind.TENSOR, index, traced[index], peaks[0])
        before = (one + step, other + step)
        matched += step


def _extra(kind: Kind, index: int, one: Allocation, peak: int) -> UnmatchedBlock:
    at_peak = index <= peak and (one.freed is None or one.freed > peak)
    place = (one.step, one.phase, one.site.module, one.site.op)
    return UnmatchedBlock(kind, index, one.size_bytes, *place, one.where, at_peak)


def _is_traced(extra: UnmatchedBlock) -> bool:
    return extra.kind in (Kind.TENSOR, Kind.SCRATCH)


def _op_totals(
    traced: Sequence[Allocation], pairs: Sequence[Pair], extras: Sequence[UnmatchedBlock]
) -> tuple[OpTotal, ...]:
    """Return the totals of each operator, in descending order of the bytes of unmatched blocks."""
    totals: dict[str, list[int]] = {}

    def add(op: str, place: int, size_bytes: int) -> None:
        row = totals.setdefault(op, [0] * 6)
        row[place] += 1
        row[place + 1] += size_bytes

    for one, _ in pairs:
        add(traced[one].site.op, 0, traced[one].size_bytes)
    for extra in extras:
        add(extra.op, 2 if _is_traced(extra) else 4, extra.size_bytes)
    rows = [OpTotal(op, *row) for op, row in totals.items()]
    rows.sort(key=lambda row: (-row.traced_only_bytes - row.recorded_only_bytes, -row.matched_bytes, row.op))
    return tuple(rows)
