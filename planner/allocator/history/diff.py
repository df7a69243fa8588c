"""A trace held against what a GPU's allocator recorded: which blocks only one side has, and where.

Both sides are rows of births. Cut where both know that a phase begins, the rows are aligned by the rounded
sizes of the blocks; what finds no partner is told with the operator that it stands in or beside.
"""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator.history.lcs import Pair, align_rows
from planner.allocator.history.sequences import (
    Birth,
    Recording,
    births_of_recording,
    births_of_trace,
    common_cuts,
    lives_of,
    marks_of_trace,
    peak_of,
)
from planner.program import Category, Phase, Trace


class Kind(StrEnum):
    """The kind of a block that only one side has."""

    WORKSPACE = "workspace"  # recorded; gone before the next block that both sides have is born
    BLOCK = "block"  # recorded; lives on
    TENSOR = "tensor"  # traced; the GPU did not make it
    SCRATCH = "scratch"  # traced by a rule for a kernel's scratch memory; the GPU did not take it


class Extra(Struct, frozen=True):
    """A block that only one side has.

    For a recorded one, module and operator are those of the traced block before it; where something died in
    between, one operator had ended, and they are those of the traced block after it.
    """

    kind: Kind
    birth: int  # index among the births of its side
    size_bytes: int  # rounded
    step: int
    phase: Phase
    module: str
    op: str
    where: str  # of a recorded block: the code that asked for it
    at_peak: bool  # whether it lives at the allocated peak of its side


class LifeDifference(Struct, frozen=True):
    """A block that both sides have and that dies at another time."""

    birth: int  # index among the traced births
    size_bytes: int
    step: int
    phase: Phase
    module: str
    op: str
    later: int  # births, of blocks that both sides have, by which the recorded one outlives the traced


class OpTotal(Struct, frozen=True):
    """Counts and bytes of an operator's blocks."""

    op: str
    matched: int
    matched_bytes: int
    traced_only: int
    traced_only_bytes: int
    recorded_only: int
    recorded_only_bytes: int


class SidePeak(Struct, frozen=True):
    """The peaks of one side, and how much of the allocated one the other side does not have."""

    allocated_bytes: int
    reserved_bytes: int
    alone_bytes: int


class Difference(Struct, frozen=True):
    """All that a trace and a recording do not share."""

    about: str
    traced_births: int
    recorded_births: int
    matched: int
    phases: int  # stretches that were aligned each by itself
    extras: tuple[Extra, ...]  # recorded and traced ones, in the order of the trace
    lives: tuple[LifeDifference, ...]
    ops: tuple[OpTotal, ...]  # by falling bytes that only one side has
    traced: SidePeak
    recorded: SidePeak
    notes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Return whether both sides are the same block by block."""
        return not self.extras and not self.lives


def compare_with_recording(trace: Trace, recording: Recording) -> Difference:
    """Align a trace with a recording of the same job at its batch size."""
    config = recording.config
    traced = births_of_trace(trace, config)
    recorded = births_of_recording(recording)
    cuts = common_cuts(marks_of_trace(trace), recording.marks, (len(traced), len(recorded)))
    pairs: list[Pair] = []
    for (t0, r0), (t1, r1) in zip(cuts, cuts[1:], strict=False):
        sizes = [birth.size_bytes for birth in traced[t0:t1]], [birth.size_bytes for birth in recorded[r0:r1]]
        found = align_rows(*sizes)
        pairs += [(one + t0, other + r0) for one, other in found]
    pairs = _prefer_equal_lives(traced, recorded, pairs)
    recorded = _name_recorded(traced, recorded, pairs, cuts)
    traced_peak = peak_of(traced, config)
    recorded_peak = peak_of(recorded, config)
    extras = _extras(traced, recorded, pairs, cuts, (traced_peak.at, recorded_peak.at))
    alone = [
        sum(extra.size_bytes for extra in extras if extra.at_peak and _is_traced(extra) is side)
        for side in (True, False)
    ]
    reserved = recording.peak_reserved_bytes
    return Difference(
        recording.about,
        len(traced),
        len(recorded),
        len(pairs),
        len(cuts) - 1,
        extras,
        _life_differences(traced, recorded, pairs),
        _op_totals(traced, pairs, extras),
        SidePeak(traced_peak.allocated_bytes, traced_peak.reserved_bytes, alone[0]),
        SidePeak(
            recorded_peak.allocated_bytes,
            recorded_peak.reserved_bytes if reserved is None else reserved,
            alone[1],
        ),
        recording.notes,
    )


# ---- lives


def _prefer_equal_lives(
    traced: Sequence[Birth], recorded: Sequence[Birth], pairs: Sequence[Pair]
) -> list[Pair]:
    """Take a neighbour without a partner where it has the same size and the life that fits.

    A kernel's workspace may be as large as its result; the two differ in when they die.
    """
    pairs = list(pairs)
    for side in (0, 1):
        lives = lives_of(traced, {one for one, _ in pairs}), lives_of(recorded, {other for _, other in pairs})
        births = (traced, recorded)[side]
        taken = {pair[side]: place for place, pair in enumerate(pairs)}
        for index, birth in enumerate(births):
            if index in taken:
                continue
            for step in (-1, 1):
                near = index + step
                while 0 <= near < len(births) and near not in taken:
                    near += step
                place = taken.get(near)
                if place is None or births[near].size_bytes != birth.size_bytes:
                    continue
                pair = pairs[place]
                wanted = lives[1 - side][pair[1 - side]]
                if lives[side][near] != wanted and lives[side][index] == wanted:
                    pairs[place] = (index, pair[1]) if side == 0 else (pair[0], index)
                    taken[index] = taken.pop(near)
                    break
    return pairs


def _life_differences(
    traced: Sequence[Birth], recorded: Sequence[Birth], pairs: Sequence[Pair]
) -> tuple[LifeDifference, ...]:
    lives = lives_of(traced, {one for one, _ in pairs}), lives_of(recorded, {other for _, other in pairs})
    found = []
    for one, other in pairs:
        later = lives[1][other] - lives[0][one]
        if later:
            birth = traced[one]
            found.append(
                LifeDifference(one, birth.size_bytes, birth.step, birth.phase, birth.module, birth.op, later)
            )
    return tuple(found)


# ---- what one side has alone


def _name_recorded(
    traced: Sequence[Birth], recorded: Sequence[Birth], pairs: Sequence[Pair], cuts: Sequence[Pair]
) -> list[Birth]:
    """Return the recorded births with step, phase, module and operator of the trace."""
    partner = {other: one for one, other in pairs}
    deaths = [0] * (len(recorded) + 1)
    for other in partner:
        died = recorded[other].died
        if died is not None:
            deaths[died] += 1
    named: list[Birth] = []
    for (t0, r0), (_, r1) in zip(cuts, cuts[1:], strict=False):
        following = _next_partners(partner, r0, r1)
        last: int | None = None
        ended = False
        for index in range(r0, r1):
            ended = ended or (index > r0 and deaths[index] > 0)
            one = partner.get(index)
            if one is not None:
                last, ended = one, False
            else:
                one = following[index - r0] if last is None or ended else last
                one = last if one is None else one
                one = min(t0, len(traced) - 1) if one is None else one
            named.append(_like(recorded[index], traced[one] if 0 <= one < len(traced) else None))
    return named


def _next_partners(partner: dict[int, int], start: int, end: int) -> list[int | None]:
    """For each recorded birth from `start` to `end`, the traced partner of the next one that has one."""
    found: list[int | None] = []
    following: int | None = None
    for index in range(end - 1, start - 1, -1):
        found.append(following)
        following = partner.get(index, following)
    return found[::-1]


def _like(birth: Birth, named: Birth | None) -> Birth:
    if named is None:
        return birth
    return replace(birth, step=named.step, phase=named.phase, module=named.module, op=named.op)


def _extras(
    traced: Sequence[Birth],
    recorded: Sequence[Birth],
    pairs: Sequence[Pair],
    cuts: Sequence[Pair],
    peaks: tuple[int, int],
) -> tuple[Extra, ...]:
    """Return what has no partner, in the order of both rows: recorded ones before the traced ones beside
    them.
    """
    found: list[Extra] = []
    lives = lives_of(recorded, {other for _, other in pairs})
    before, matched = (0, 0), 0
    # A cut stands before the pair that begins there, so that its phase's extras stay in it.
    stops = sorted([*((cut, 0) for cut in cuts[1:]), *((pair, 1) for pair in pairs)])
    for (one, other), step in stops:
        for index in range(before[1], other):
            kind = Kind.WORKSPACE if lives[index] == matched and _dies(recorded[index]) else Kind.BLOCK
            found.append(_extra(kind, index, recorded[index], peaks[1]))
        for index in range(before[0], one):
            kind = Kind.SCRATCH if traced[index].category is Category.WORKSPACE else Kind.TENSOR
            found.append(_extra(kind, index, traced[index], peaks[0]))
        before = (one + step, other + step)
        matched += step
    return tuple(found)


def _dies(birth: Birth) -> bool:
    return birth.died is not None


def _extra(kind: Kind, index: int, birth: Birth, peak: int) -> Extra:
    lives = index <= peak and (birth.died is None or birth.died > peak)
    return Extra(
        kind,
        index,
        birth.size_bytes,
        birth.step,
        birth.phase,
        birth.module,
        birth.op,
        birth.where,
        lives,
    )


def _is_traced(extra: Extra) -> bool:
    return extra.kind in (Kind.TENSOR, Kind.SCRATCH)


def _op_totals(
    traced: Sequence[Birth], pairs: Sequence[Pair], extras: Sequence[Extra]
) -> tuple[OpTotal, ...]:
    """Sums by operator, the largest disagreement first."""
    totals: dict[str, list[int]] = {}

    def add(op: str, place: int, size_bytes: int) -> None:
        row = totals.setdefault(op, [0] * 6)
        row[place] += 1
        row[place + 1] += size_bytes

    for one, _ in pairs:
        add(traced[one].op, 0, traced[one].size_bytes)
    for extra in extras:
        add(extra.op, 2 if _is_traced(extra) else 4, extra.size_bytes)
    rows = [OpTotal(op, *row) for op, row in totals.items()]
    rows.sort(key=lambda row: (-row.traced_only_bytes - row.recorded_only_bytes, -row.matched_bytes, row.op))
    return tuple(rows)
