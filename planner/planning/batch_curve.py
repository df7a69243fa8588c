"""Memory against batch size, card by card: what a page or a plot needs to answer for any batch at once.

Each point is what an estimate of that batch on that card says. Cards share the runs that no card disturbs.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.allocator import Arena, Replay, replay_trace, room_bytes
from planner.hardware import Budget, process_bytes, upper_process_bytes
from planner.planning.fleet import Traces, is_plain
from planner.planning.max_batch import without_end
from planner.planning.search import LARGEST_BATCH
from planner.program import Floor, Outcome, Target, Trace

BEYOND = 1.35  # of the largest batch size of a card: how far its curve goes
ENDLESS_BEYOND = 4  # times the batch asked for, on a card without end


@dataclass(frozen=True, slots=True)
class Grid:
    """How close the points of a curve lie: so many for each doubling."""

    per_doubling: int  # a power of two
    doublings: int  # below the top; smaller sizes lie so close in a plot that powers of two will do


CHOSEN_GRID = Grid(8, 4)
OTHER_GRID = Grid(4, 2)  # of the cards that were not asked for; there are many of them


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One batch size on one card; the figures are those of a card without end where it does not fit."""

    batch: int
    outcome: Outcome
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    process_upper_bytes: int  # the same at the confidence


@dataclass(frozen=True, slots=True)
class CardCurve:
    """One card's points, by rising batch size."""

    budget: Budget
    max_batch: int | None  # 0 where not even 1 fits; None on a card without end
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class BatchCurve:
    """One job on several cards."""

    batch: int  # that was asked for; each card has a point for it
    cards: tuple[CardCurve, ...]
    chosen: int  # index into `cards` of the one that was asked for


def take_curve(
    cards: Sequence[tuple[Budget, int | None]], traces: Traces, batch: int, chosen: int = 0
) -> BatchCurve:
    """The curves of cards whose largest batch sizes are known. Raises the errors of the traces."""
    wanted: dict[int, list[int]] = {}
    for number, (_, most) in enumerate(cards):
        for size in curve_sizes(most, batch, CHOSEN_GRID if number == chosen else OTHER_GRID):
            wanted.setdefault(size, []).append(number)
    floors = {chip: traces.floor(chip) for chip in {budget.device.target for budget, _ in cards}}
    points: list[list[CurvePoint]] = [[] for _ in cards]
    for size in sorted(wanted):
        runs = _Runs(size, traces, floors)
        for number in wanted[size]:
            points[number].append(_point(runs, cards[number][0]))
    curves = (CardCurve(budget, most, tuple(own)) for (budget, most), own in zip(cards, points, strict=True))
    return BatchCurve(batch, tuple(curves), chosen)


def curve_sizes(max_batch: int | None, batch: int, grid: Grid) -> list[int]:
    """The batch sizes of a card's curve: beyond what fits and what is asked for, with both in it."""
    if max_batch is None:
        return sorted({batch, *_even_sizes(ENDLESS_BEYOND * batch, grid)})
    top = max(round(BEYOND * max_batch), round(1.1 * batch), 4)
    return sorted({batch, max(1, max_batch), *_even_sizes(top, grid)})


def _even_sizes(top: int, grid: Grid) -> set[int]:
    """Sizes from 1 to the first that is not below the top, which many cards share."""
    sizes, size, end = {1}, 1, min(top, LARGEST_BATCH)
    while size < end:
        size += max(1, 2 ** (size.bit_length() - 1) // grid.per_doubling)
        sizes.add(size)
    fine = top >> grid.doublings
    return {size for size in sizes if size <= LARGEST_BATCH and (size >= fine or size & (size - 1) == 0)}


def _point(runs: "_Runs", budget: Budget) -> CurvePoint:
    outcome, run = runs.on(budget)
    reserved = run.peak_reserved_bytes
    return CurvePoint(
        runs.batch,
        outcome,
        run.peak_allocated_bytes,
        reserved,
        process_bytes(budget, reserved),
        upper_process_bytes(budget, reserved),
    )


@dataclass(slots=True)
class _Runs:
    """Replays of one batch size, each made once for all cards on which it goes the same way."""

    batch: int
    traces: Traces
    floors: Mapping[Target, Floor]
    _number: dict[Target, int] = field(default_factory=dict)  # of its trace among the distinct ones
    _kin: dict[Hashable, int] = field(default_factory=dict)  # the same by what their traces are known by
    _distinct: list[Trace] = field(default_factory=list)
    _done: dict[tuple[int, Arena], Replay] = field(default_factory=dict)

    def on(self, budget: Budget) -> tuple[Outcome, Replay]:
        """What comes of the batch on a card, and the run that the figures are of."""
        arena, chip = budget.arena, budget.device.target
        endless = self._replay(chip, without_end(arena))
        room = room_bytes(arena)
        if is_plain(arena) and (room is None or endless.peak_reserved_bytes <= room):
            return Outcome.FITS, endless  # no request was refused, and none would be here
        if room is not None and self.floors[chip](self.batch) > room:
            return Outcome.DOES_NOT_FIT, endless
        run = self._replay(chip, arena)
        return run.outcome, endless if run.outcome is Outcome.DOES_NOT_FIT else run

    def _replay(self, chip: Target, arena: Arena) -> Replay:
        if chip not in self._number:
            self._number[chip] = self._number_of(chip)
        key = self._number[chip], arena
        if key not in self._done:
            self._done[key] = replay_trace(self._distinct[key[0]], self.batch, arena)
        return self._done[key]

    def _number_of(self, chip: Target) -> int:
        kin = self.traces.kin(self.batch, chip)
        if kin is None or kin not in self._kin:
            number = self._place(self.traces.at(self.batch, chip))
            if kin is None:
                return number
            self._kin[kin] = number
        return self._kin[kin]

    def _place(self, trace: Trace) -> int:
        """Its number; kinds of GPUs that run the same events share one."""
        for number, known in enumerate(self._distinct):
            if known.events == trace.events:
                return number
        self._distinct.append(trace)
        return len(self._distinct) - 1
