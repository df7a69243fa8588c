"""The smallest sets of changes that make a batch fit, each of them traced and replayed, none guessed.

Sets are tried from small to large. Changes of one group exclude each other, a set that contains one which
fits already is not minimal, and a set whose changes together save far too little by themselves is not tried.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import MemoryLimits, replay_trace
from planner.errors import ModelError, UsageError
from planner.hardware import Budget, with_config
from planner.planning.changes import Change, TrainingConfig, apply_all, changes_for
from planner.planning.epoch import with_last_batch
from planner.planning.estimate import Estimate, estimate_batch, unlimited
from planner.program import OnProgress, Outcome, Trace, TraceSource, ignore_progress, live_bytes_bound

LARGEST_SET = 3
ENOUGH = 8  # sets that fit, after which no more are looked for
# Savings do not add up: two changes may free the same memory, or make way for each other. Sets whose savings
# sum up to less than this share of what is missing are left out.
HOPEFUL_SHARE = 0.7
RESOLUTION_BYTES = 2**20
MOST_EVENTS_OF_SLOW = 2_000  # of a recipe's trace: compiling ResNet-50, which has more, takes half a minute

TracerFactory = Callable[[TrainingConfig], TraceSource]  # the tracer of a changed job


class Attempt(Struct, frozen=True):
    """The result of a set of changes."""

    changes: tuple[Change, ...]
    training: TrainingConfig
    estimate: Estimate
    events: int  # of its trace
    needed_bytes: int  # the least that the allocator needs for it, to 1 MiB

    @property
    def fits(self) -> bool:
        """Return whether the batch fits with them."""
        return self.estimate.outcome is not Outcome.DOES_NOT_FIT

    @property
    def cost(self) -> tuple[int, int, int]:
        """For sorting: few changes first, then mild ones, then those that leave most room."""
        return len(self.changes), sum(change.rank for change in self.changes), self.needed_bytes


class Advice(Struct, frozen=True):
    """The smallest sets of changes that make a batch fit."""

    unchanged: Attempt
    sets: tuple[Attempt, ...]  # minimal sets that fit, the best first; empty where nothing helps
    singles: tuple[Attempt, ...]  # every change by itself, whether it is enough or not, the mildest first
    failed: tuple[tuple[str, str], ...]  # changes that the model does not go along with, and why
    available_bytes: int | None  # what the allocator may take; None: any amount
    seconds: float


def advise(
    training: TrainingConfig,
    budget: Budget,
    open_tracer: TracerFactory,
    on_progress: OnProgress = ignore_progress,
) -> Advice:
    """Try changes by themselves, then in pairs and triples, until enough sets fit."""
    start = perf_counter()
    failed: dict[tuple[Change, ...], str] = {}

    def try_changes(changes: tuple[Change, ...]) -> Attempt | None:
        on_progress(f"trying {names_of(changes) or 'the recipe as it is'}")
        if any(set(refused) <= set(changes) for refused in failed):
            return None
        try:
            return _try(training, changes, budget, open_tracer)
        except (ModelError, UsageError) as error:
            if not changes:
                raise
            failed[changes] = str(error)
            return None

    unchanged = try_changes(())
    assert unchanged is not None
    budget = unchanged.estimate.budget  # with the margins of the recipe as it is
    singles: list[Attempt] = []
    is_deep = unchanged.events > MOST_EVENTS_OF_SLOW
    for change in changes_for(training, budget.device.capability):
        if change.is_slow and is_deep:
            failed[(change,)] = "trying it takes long with so many operators; planner estimate plans it"
        elif not _is_too_much(change, unchanged, singles):
            attempt = try_changes((change,))
            singles += [] if attempt is None else [attempt]
    sets = [] if unchanged.fits else _minimal_sets(unchanged, singles, budget, try_changes)
    return Advice(
        unchanged,
        tuple(sorted(sets, key=lambda attempt: attempt.cost)),
        tuple(singles),
        tuple((names_of(changes), reason) for changes, reason in failed.items()),
        budget.limits.allocator_limit_bytes,
        perf_counter() - start,
    )


def names_of(changes: tuple[Change, ...]) -> str:
    """Return the options of some changes, as the command line takes them."""
    return " ".join(change.name for change in changes)


def _is_too_much(change: Change, unchanged: Attempt, singles: Sequence[Attempt]) -> bool:
    """Return whether a smaller degree of the same change, such as 2 micro-batches for 4, is enough."""
    enough = [attempt for attempt in singles if attempt.fits and attempt.changes[0].group == change.group]
    return bool(enough) and (not unchanged.fits or change.group == "accumulation")


def _minimal_sets(
    unchanged: Attempt,
    singles: Sequence[Attempt],
    budget: Budget,
    try_changes: Callable[[tuple[Change, ...]], Attempt | None],
) -> list[Attempt]:
    fitting = [attempt for attempt in singles if attempt.fits]
    saved = {attempt.changes[0]: unchanged.needed_bytes - attempt.needed_bytes for attempt in singles}
    missing = unchanged.needed_bytes - (budget.limits.allocator_limit_bytes or unchanged.needed_bytes)
    useful = tuple(change for change, size in saved.items() if size > 0 and not change.is_slow)
    for size in range(2, LARGEST_SET + 1):
        for changes in _hopeful(useful, size, saved, missing):
            if len(fitting) >= ENOUGH:
                return fitting
            if not any(set(attempt.changes) <= set(changes) for attempt in fitting):
                attempt = try_changes(changes)
                if attempt is not None and attempt.fits:
                    fitting.append(attempt)
    return fitting


def _hopeful(
    changes: tuple[Change, ...], size: int, saved: Mapping[Change, int], missing: int
) -> Iterator[tuple[Change, ...]]:
    """Yield the sets of this size whose savings may do, the mildest first."""
    for chosen in sorted(combinations(changes, size), key=lambda some: sum(change.rank for change in some)):
        groups = {change.group for change in chosen}
        if len(groups) == size and sum(saved[change] for change in chosen) >= HOPEFUL_SHARE * missing:
            yield chosen


def _try(
    training: TrainingConfig, changes: tuple[Change, ...], budget: Budget, open_tracer: TracerFactory
) -> Attempt:
    changed = apply_all(training, changes)
    trace = with_last_batch(changed.job, changed.batch, open_tracer(changed))
    own = with_config(budget, changed.config)
    estimate = estimate_batch(changed.job, trace, own)
    return Attempt(
        changes,
        changed,
        estimate,
        len(trace.events),
        _needed(trace, own.limits, estimate.run.peak_reserved_bytes),
    )


def _needed(trace: Trace, limits: MemoryLimits, most_bytes: int) -> int:
    """Return the smallest capacity within which the replay does not fail."""
    low = live_bytes_bound(trace.events)(trace.batch) // RESOLUTION_BYTES - 1
    high = most_bytes // RESOLUTION_BYTES + 1
    while high - low > 1:
        middle = (low + high) // 2
        run = replay_trace(trace, replace(unlimited(limits), capacity_bytes=middle * RESOLUTION_BYTES))
        low, high = (middle, high) if run.outcome is Outcome.DOES_NOT_FIT else (low, middle)
    return high * RESOLUTION_BYTES
