"""One job on many cards: the largest batch size of each, from few traces and as few replays as that takes.

Cards with one kind of GPU share their traces. A replay that fits without releasing cached memory runs
the same on every card that has its peak, and where tensors alone exceed a card, no replay is needed to know
that the batch does not fit. Neither changes an answer: each is the one that `plan_max_batch` gives.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import linear_regression
from types import MappingProxyType
from typing import Protocol

from planner.allocator import Arena, Replay, replay_trace, room_bytes
from planner.hardware import ENDLESS_BYTES, Budget, process_bytes, upper_process_bytes
from planner.jobs import Job
from planner.planning.epoch import last_batch, most_batch, over_epoch
from planner.planning.max_batch import Seconds, without_end
from planner.planning.search import LARGEST_BATCH, boundary_by_line, boundary_near, climb_islands
from planner.program import Floor, Outcome, Target, Trace

_REMEMBERED_TRACES = 4  # the cards of one memory ask for the same batch sizes
USUAL_ERROR = 2  # of a guess, in samples; of large batches, a hundredth
USUAL_GAP = 10  # below the floor's largest, in samples; of large batches, one part in so many
SAMPLE = 4  # cards that are looked at for batch sizes that fit above some that do not
USUAL_SHARE = 0.97  # of what the floor allows, most jobs reach about so much


class Traces(Protocol):
    """Where the traces of a job come from, for a batch size on a GPU of one kind."""

    def at(self, batch: int, chip: Target) -> Trace:
        """The whole trace."""

    def kin(self, batch: int, chip: Target) -> Hashable:
        """Equal for kinds of GPUs that run the same events; None where only the traces themselves tell."""

    def floor(self, chip: Target) -> Floor:
        """A bound from below; a function that gives 0 will do."""


@dataclass(frozen=True, slots=True)
class OverEpoch:
    """Traces of a job with the smaller batch that its epochs end with."""

    job: Job
    traces: Traces

    def at(self, batch: int, chip: Target) -> Trace:
        """As `over_epoch` puts it together."""
        return over_epoch(self.job, batch, lambda size: self.traces.at(size, chip))

    def kin(self, batch: int, chip: Target) -> Hashable:
        """Both batch sizes decide."""
        sizes = [size for size in (batch, last_batch(self.job, batch)) if size]
        known = tuple(self.traces.kin(size, chip) for size in sizes)
        return None if None in known else known

    def floor(self, chip: Target) -> Floor:
        """That of full batches; above the epoch there is nothing to find."""
        floor, most = self.traces.floor(chip), most_batch(self.job)
        return lambda batch: floor(batch) if batch <= most else ENDLESS_BYTES


@dataclass(frozen=True, slots=True)
class CardFit:
    """What one card can do with the job."""

    budget: Budget
    max_batch: int  # 0 where not even 1 fits
    batch: int  # that the figures below are of: the one asked for, else the largest, else 1
    outcome: Outcome  # of that batch on this card
    process_bytes: int  # what nvidia-smi shows at its peak; on a card without end where it does not fit
    process_upper_bytes: int  # the same at the confidence
    comfortable_batch: int  # the largest without retries; 0 where none runs without

    @property
    def headroom_bytes(self) -> int:
        """What the process leaves of the card's memory; negative where it does not fit."""
        return self.budget.device.usable.value - self.process_bytes

    @property
    def is_calibrated(self) -> bool:
        """Whether a line through measured runs of this job answers, and not the defaults."""
        return self.budget.correction is not None and self.budget.correction.fit is not None


@dataclass(frozen=True, slots=True)
class CardTable:
    """One job on many cards, and how it was found out."""

    job: Job
    batch: int | None  # None where the largest of each card is asked for
    confidence: float
    fits: tuple[CardFit, ...]  # in the order asked for
    left_out: int  # cards that do not run the batch asked for
    notes: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    import_seconds: float
    seconds: Seconds
    traces: Traces  # that answered; a picture wants more of them
    multiple_of: int = 1  # that the largest batches had to be


def curve(table: CardTable, points: int = 40) -> tuple[tuple[int, int], ...]:
    """Batch sizes up to the largest of any card, and what the process takes on the middle one without end."""
    by_size = sorted((fit for fit in table.fits if fit.max_batch), key=lambda fit: fit.max_batch)
    budget, top = by_size[len(by_size) // 2].budget, by_size[-1].max_batch
    sizes = sorted({max(1, round(top * step / points)) for step in range(points + 1)})
    plain, arena = replace(budget, correction=None), without_end(budget.arena)
    found = []
    for size in sizes:
        run = replay_trace(table.traces.at(size, budget.device.target), size, arena)
        found.append((size, process_bytes(plain, run.peak_reserved_bytes)))
    return tuple(found)


def fit_cards(
    budgets: Iterable[Budget],
    traces: Traces,
    batch: int | None = None,
    guesses: Mapping[Arena, int] = MappingProxyType({}),
    multiple_of: int = 1,
) -> tuple[CardFit, ...]:
    """The largest batch size of each card, and the figures at `batch` or, by default, at the largest.

    Where the traces know no floor, the search starts from `guesses`. Answers are rounded down to multiples of
    `multiple_of` that fit.

    Batch sizes that fit above some that do not are a habit of the job, not of the card: a card that stays
    below the line of the others is searched anew as `largest` does, and where that finds more, so is every
    card, since with such a job the answer depends on the way of searching. So that smaller ones show as well,
    some cards are climbed from where they are, and where one rises, so is every card.
    """
    cards = sorted(budgets, key=lambda budget: (_kind(budget), budget.device.usable.value))
    hints: dict[int, int] = {}
    shared: dict[tuple[Hashable, int], int] = {}
    shelves = [
        _Shelf(_Runs(traces, Target(*kind), traces.floor(Target(*kind)), shared, hints), tuple(group))
        for kind, group in groupby(cards, key=_kind)
    ]
    gaps: list[tuple[int, int]] = []  # the floor's largest batch, and how far below it a card stays
    suspects = [(shelf, arena) for shelf in shelves for arena in _search(shelf, gaps, guesses)]
    if any(_searched_alone(shelf, arena) != shelf.largest[arena] for shelf, arena in suspects):
        for shelf in shelves:
            for arena in shelf.largest:
                shelf.largest[arena] = _searched_alone(shelf, arena)
    elif any(_climbed(shelf, arena) != shelf.largest[arena] for shelf, arena in _some(shelves)):
        for shelf in shelves:
            for arena in shelf.largest:
                shelf.largest[arena] = _climbed(shelf, arena)
    return tuple(_at(shelf, budget, batch, multiple_of) for shelf in shelves for budget in shelf.cards)


def _kind(budget: Budget) -> tuple[tuple[int, int], int]:
    chip = budget.device.target
    return chip.capability, chip.sm_count


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The cards with one kind of GPU, by rising memory."""

    runs: "_Runs"
    cards: tuple[Budget, ...]
    largest: dict[Arena, int] = field(default_factory=dict)


def _search(shelf: _Shelf, gaps: list[tuple[int, int]], guesses: Mapping[Arena, int]) -> list[Arena]:
    """Find the boundary of each card from those of the cards before, which `gaps` remembers; gives those that
    lie lower than could be guessed.
    """
    low = []
    for budget in shelf.cards:
        arena, top = budget.arena, shelf.runs.top(budget.arena)
        if arena not in shelf.largest:
            # Without a floor the guess would be the largest number there is: gallop from the bottom instead.
            # Each probe is then a run of the model, and no card can be told to lie low.
            guess = _guess(gaps, top) if top < LARGEST_BATCH else guesses.get(arena, 0)
            best = shelf.largest[arena] = boundary_near(shelf.runs.teller(arena), guess, top)
            is_low = best < guess - max(USUAL_ERROR, guess // 100)
            if top < LARGEST_BATCH and (is_low or top - best > max(USUAL_GAP, top // USUAL_GAP)):
                low.append(arena)
            if best and top < LARGEST_BATCH:
                gaps.append((top, top - best))
    return low


def _guess(gaps: list[tuple[int, int]], top: int) -> int:
    """The batch size at which a card stays as far below the floor's largest as the line of the others."""
    tops = [above for above, _ in gaps]
    if len(set(tops)) < 2:
        return round(USUAL_SHARE * top)
    line = linear_regression(tops, [gap for _, gap in gaps])
    return max(1, top - round(max(0.0, line.intercept + line.slope * top)))


def _searched_alone(shelf: _Shelf, arena: Arena) -> int:
    """What `largest` finds."""
    return climb_islands(shelf.runs.teller(arena), 0, LARGEST_BATCH)


def _climbed(shelf: _Shelf, arena: Arena) -> int:
    """What fits above the boundary that was found, as far as `largest` would look."""
    best = shelf.largest[arena]
    return climb_islands(shelf.runs.teller(arena), best, LARGEST_BATCH) if best else 0


def _some(shelves: Iterable[_Shelf]) -> list[tuple[_Shelf, Arena]]:
    """Cards evenly from the smallest boundary to the largest; none where each probe is a run of a model."""
    cards = [(shelf, arena) for shelf in shelves for arena in shelf.largest]
    cards = [(shelf, arena) for shelf, arena in cards if shelf.runs.top(arena) < LARGEST_BATCH]
    cards.sort(key=lambda card: card[0].largest[card[1]])
    last = len(cards) - 1
    places = {round(last * step / (SAMPLE - 1)) for step in range(SAMPLE)} if cards else set()
    return [cards[place] for place in sorted(places)]


def _at(shelf: _Shelf, budget: Budget, wanted: int | None, multiple_of: int) -> CardFit:
    largest, runs = shelf.largest[budget.arena], shelf.runs
    fits = runs.teller(budget.arena)
    multiples = range(largest - largest % multiple_of, 0, -multiple_of)
    largest = next((size for size in multiples if fits(size)), 0)
    batch = wanted or largest or 1
    outcome = runs.outcome(batch, budget.arena)
    arena = without_end(budget.arena) if outcome is Outcome.DOES_NOT_FIT else budget.arena
    peak_bytes = runs.peak_reserved_bytes(batch, arena)
    process, upper = process_bytes(budget, peak_bytes), upper_process_bytes(budget, peak_bytes)
    comfortable = runs.comfortable(largest, budget.arena) if largest else 0
    comfortable -= comfortable % multiple_of
    return CardFit(budget, largest, batch, outcome, process, upper, comfortable)


@dataclass(slots=True)
class _Runs:
    """Replays of the cards with one kind of GPU, each made once."""

    traces: Traces
    chip: Target
    floor: Floor
    shared: dict[
        tuple[Hashable, int], int
    ]  # the peaks below of all kinds of GPUs, by the kin of their traces
    hints: dict[int, int]  # peaks of other kinds of GPUs as well, which are much like those here
    _whole: dict[int, Trace] = field(default_factory=dict)
    _done: dict[tuple[int, Arena], Replay] = field(default_factory=dict)
    _peaks: dict[int, int] = field(default_factory=dict)  # reserved, of runs that nothing disturbed

    def top(self, arena: Arena) -> int:
        """The largest batch size that the floor, which rises with the batch size, does not rule out."""
        room = room_bytes(arena)
        if room is None:
            return LARGEST_BATCH
        return bisect_right(range(1, LARGEST_BATCH + 1), room, key=self.floor)

    def teller(self, arena: Arena) -> Callable[[int], bool]:
        """Whether a batch size fits."""
        return lambda batch: self.outcome(batch, arena) is not Outcome.DOES_NOT_FIT

    def outcome(self, batch: int, arena: Arena) -> Outcome:
        """What comes of the batch."""
        room = room_bytes(arena)
        if room is not None and self.floor(batch) > room:
            return Outcome.DOES_NOT_FIT
        if self._ran_undisturbed(batch, arena):
            return Outcome.FITS
        return self._replay(batch, arena).outcome

    def peak_reserved_bytes(self, batch: int, arena: Arena) -> int:
        """Of a batch that fits."""
        if self._ran_undisturbed(batch, arena):
            return self._peaks[batch]
        return self._replay(batch, arena).peak_reserved_bytes

    def comfortable(self, largest: int, arena: Arena) -> int:
        """The largest batch size up to `largest`, which fits, that runs without retries."""
        if self.outcome(largest, arena) is Outcome.FITS:
            return largest
        room = room_bytes(arena)
        if not is_plain(arena) or room is None:
            return boundary_near(lambda batch: self.outcome(batch, arena) is Outcome.FITS, largest, largest)
        peak = lambda batch: self._undisturbed_peak(batch, arena)  # noqa: E731
        return boundary_by_line(peak, room, self.hints, largest)

    def _undisturbed_peak(self, batch: int, arena: Arena) -> int:
        """What is reserved where memory has no end: a batch runs without retries where that is there."""
        if batch not in self._peaks:
            kin = self.traces.kin(batch, self.chip)
            peak_bytes = None if kin is None else self.shared.get((kin, batch))
            if peak_bytes is None:
                peak_bytes = self._replay(batch, without_end(arena)).peak_reserved_bytes
            self._peaks[batch] = self.shared[kin, batch] = peak_bytes
        self.hints[batch] = self._peaks[batch]
        return self._peaks[batch]

    def _ran_undisturbed(self, batch: int, arena: Arena) -> bool:
        """Whether a run was seen that on this card goes the same way from its first event to its last."""
        room, peak = room_bytes(arena), self._peaks.get(batch)
        return peak is not None and is_plain(arena) and (room is None or peak <= room)

    def _replay(self, batch: int, arena: Arena) -> Replay:
        run = self._done.get((batch, arena))
        if run is None:
            if batch not in self._whole:
                if len(self._whole) >= _REMEMBERED_TRACES:
                    del self._whole[next(iter(self._whole))]
                self._whole[batch] = self.traces.at(batch, self.chip)
            run = self._done[batch, arena] = replay_trace(self._whole[batch], batch, arena)
            if run.outcome is Outcome.FITS and is_plain(arena):
                self._peaks[batch] = run.peak_reserved_bytes
        return run


def is_plain(arena: Arena) -> bool:
    """Whether nothing but a refused request lets the allocator act on how much memory there is."""
    rules = arena.rules
    fraction = rules.per_process_memory_fraction < 1
    return not (rules.expandable_segments or rules.garbage_collection_threshold > 0 or fraction)
