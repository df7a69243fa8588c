"""Find the smallest sets of changes that make a batch fit.

Each set is traced and replayed. Sets are tried from small to large. Changes of one group exclude each other,
and a set that contains a smaller set that fits is not minimal. A set is not tried if the savings of its
single changes, combined for each part of the memory, are too small. A change to the optimizer's step is
not tried if memory peaks elsewhere.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import MemoryLimits, replay_trace
from planner.errors import ModelError, UsageError
from planner.hardware import Budget, judge_budget, with_config
from planner.jobs import Job
from planner.planning.changes import (
    OPTIMIZERS,
    SMALLER_BATCHES,
    Change,
    TrainingConfig,
    apply_all,
    changes_for,
)
from planner.planning.epoch import with_last_batch
from planner.planning.estimate import Estimate, estimate_batch, unlimited
from planner.program import (
    Alloc,
    Category,
    Event,
    Free,
    OnProgress,
    Outcome,
    Phase,
    PhaseStart,
    Trace,
    TraceSource,
    ignore_progress,
    live_bytes_bound,
)

LARGEST_SET = 3
ENOUGH = 5  # sets that fit, after which no more sets are tried
ENOUGH_PAIRS = 3  # sets of one or two changes that fit, after which no sets of three changes are tried
HOPEFUL_SHARE = 0.95  # share of the missing memory that a set has to promise to save
LITTLE_SHARE = 0.05  # share of the missing (or needed) memory that a change must save to be tried
RESOLUTION_BYTES = 2**20
MOST_EVENTS_OF_SLOW = 2_000  # of a recipe's trace: compiling ResNet-50, which has more, takes half a minute

TracerFactory = Callable[[TrainingConfig], TraceSource]  # the tracer of a changed job


class Attempt(Struct, frozen=True):
    """A set of changes to a job, with the estimate, trace and needed memory of the changed job."""

    changes: tuple[Change, ...]
    training: TrainingConfig
    estimate: Estimate
    trace: Trace
    needed_bytes: int  # the smallest memory of the allocator in which the run fits, to 1 MiB

    @property
    def fits(self) -> bool:
        """Return whether the batch fits with the changes, with or without retries."""
        return self.estimate.outcome is not Outcome.DOES_NOT_FIT

    @property
    def parts(self) -> Mapping[str, int]:
        """Return the bytes at the allocated peak by category; the key "" has the rest of the needed bytes."""
        between = max(0, self.needed_bytes - self.estimate.run.peak_allocated_bytes)
        return {str(category): size for category, size in self.estimate.at_peak.items()} | {"": between}

    @property
    def cost(self) -> tuple[int, int, int]:
        """Return the sort key: the number of changes, then the sum of their ranks, then the needed bytes."""
        return len(self.changes), sum(change.rank for change in self.changes), self.needed_bytes


class Advice(Struct, frozen=True):
    """The minimal sets of changes that make a batch fit, the single changes tried, and those ruled out."""

    unchanged: Attempt
    sets: tuple[Attempt, ...]  # minimal sets that fit, the best first; empty if none fits or none is needed
    singles: tuple[Attempt, ...]  # every change that was tried by itself, the mildest first
    failed: tuple[tuple[str, str], ...]  # changes that the model refuses or that cannot save much, and why
    available_bytes: int | None  # bytes that the allocator may take; None if they are unlimited
    seconds: float


def advise(
    training: TrainingConfig,
    budget: Budget,
    open_tracer: TracerFactory,
    on_progress: OnProgress = ignore_progress,
) -> Advice:
    """Find the smallest sets of changes that make a batch fit.

    Single changes are tried, and if the batch does not fit unchanged, sets of two and three until enough fit.
    """
    start = perf_counter()
    failed: dict[tuple[Change, ...], str] = {}

    def try_changes(changes: tuple[Change, ...]) -> Attempt | None:
        on_progress(f"trying {names_of(changes) or 'the recipe as it is'}")
        if any(set(refused) <= set(changes) for refused in failed):
            return None
        try:
            changed = apply_all(training, changes)
            trace = with_last_batch(changed.job, changed.batch, open_tracer(changed))
            own = with_config(budget, changed.config)
            if len(changes) > 1 and not _fits(changed.job, trace, own):
                return None
            return _attempt(changes, changed, trace, own)
        except (ModelError, UsageError) as error:
            if not changes:
                raise
            failed[changes] = str(error)
            return None

    unchanged = try_changes(())
    assert unchanged is not None
    budget = unchanged.estimate.budget  # with the margins of the recipe as it is
    ruled_out = _rule_out(unchanged, budget.limits.allocator_limit_bytes)
    singles: list[Attempt] = []
    is_deep = len(unchanged.trace.events) > MOST_EVENTS_OF_SLOW
    for change in changes_for(training, budget.device.capability):
        if change.is_slow and is_deep:
            failed[(change,)] = "trying it takes long with so many operators; planner estimate plans it"
        elif change.group == OPTIMIZERS and (reason := ruled_out[_keeps_optimizer(change, training)]):
            failed[(change,)] = reason
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


def _keeps_optimizer(change: Change, training: TrainingConfig) -> bool:
    return change.apply(training).job.loop.optimizer == training.job.loop.optimizer


def _rule_out(unchanged: Attempt, limit_bytes: int | None) -> dict[bool, str]:
    """Return why changes to the optimizer cannot help, or "" if they can, by whether they keep the optimizer.

    A change cannot help if it saves too little memory. A change that keeps the optimizer keeps its state.
    """
    needed_bytes, reasons = unchanged.needed_bytes, {True: "", False: ""}
    missing_bytes = needed_bytes if unchanged.fits or limit_bytes is None else needed_bytes - limit_bytes
    for keeps_optimizer in reasons:
        others = _outside_updates(unchanged.trace.events, without_state=not keeps_optimizer)
        most_bytes = needed_bytes - live_bytes_bound(others)(unchanged.trace.batch)
        if most_bytes < LITTLE_SHARE * missing_bytes:
            saved = f"no more than {most_bytes / RESOLUTION_BYTES:,.0f} MiB are saved"
            reasons[keeps_optimizer] = f"{saved}, since memory peaks outside of the optimizer's step"
    return reasons


def _outside_updates(events: Iterable[Event], without_state: bool) -> Iterator[Event]:
    """Yield the events, leaving out blocks of the optimizer's steps except optimizer state.

    If `without_state` is true, optimizer state is left out too, in whichever phase it is allocated.
    """
    phase, left_out = Phase.SETUP, set()
    for event in events:
        if isinstance(event, PhaseStart):
            phase = event.phase
        elif isinstance(event, Alloc):
            is_state = event.category is Category.OPTIMIZER
            if without_state if is_state else phase is Phase.OPTIMIZER:
                left_out.add(event.block)
                continue
        elif isinstance(event, Free) and event.block in left_out:
            left_out.remove(event.block)
            continue
        yield event


def names_of(changes: tuple[Change, ...]) -> str:
    """Return the names of changes, joined by spaces as on the command line."""
    return " ".join(change.name for change in changes)


def _is_too_much(change: Change, unchanged: Attempt, singles: Sequence[Attempt]) -> bool:
    """Return whether a change is not worth trying, since a milder change of its group makes the batch fit.

    The milder change was tried earlier. If the batch fits unchanged, only smaller batches are compared.
    """
    enough = [attempt for attempt in singles if attempt.fits and attempt.changes[0].group == change.group]
    return bool(enough) and (not unchanged.fits or change.group == SMALLER_BATCHES)


def _minimal_sets(
    unchanged: Attempt,
    singles: Sequence[Attempt],
    budget: Budget,
    try_changes: Callable[[tuple[Change, ...]], Attempt | None],
) -> list[Attempt]:
    fitting = [attempt for attempt in singles if attempt.fits]
    capacity_bytes = budget.limits.allocator_limit_bytes or unchanged.needed_bytes
    hopeful_bytes = capacity_bytes + (1 - HOPEFUL_SHARE) * (unchanged.needed_bytes - capacity_bytes)
    useful = [
        attempt
        for attempt in singles
        if attempt.needed_bytes < unchanged.needed_bytes and not attempt.changes[0].is_slow
    ]
    for size in range(2, LARGEST_SET + 1):
        if size == LARGEST_SET and len(fitting) >= ENOUGH_PAIRS:
            return fitting
        for chosen in _combinations(useful, size):
            changes = tuple(attempt.changes[0] for attempt in chosen)
            if len(fitting) >= ENOUGH:
                return fitting
            if any(set(attempt.changes) <= set(changes) for attempt in fitting):
                continue
            if _promised_bytes(unchanged, chosen) <= hopeful_bytes:
                attempt = try_changes(changes)
                if attempt is not None and attempt.fits:
                    fitting.append(attempt)
    return fitting


def _combinations(singles: Sequence[Attempt], size: int) -> Iterator[tuple[Attempt, ...]]:
    """Yield the sets of `size` attempts whose changes are of different groups, the mildest set first."""
    every = combinations(singles, size)
    for chosen in sorted(every, key=lambda some: sum(attempt.changes[0].rank for attempt in some)):
        if len({attempt.changes[0].group for attempt in chosen}) == size:
            yield chosen


def _promised_bytes(unchanged: Attempt, chosen: Sequence[Attempt]) -> float:
    """Estimate the bytes that a batch needs with several changes from the bytes with each change alone.

    It follows from the share of each part of the memory that a change saves. Two changes may free the same
    memory, but no more of a part than there is. Smaller batches shrink the rest that the other changes leave.
    New peaks that changes make are not counted.
    """
    total_bytes = 0.0
    after = [(attempt.changes[0].group, attempt.parts) for attempt in chosen]
    for part, size_bytes in unchanged.parts.items():
        kept = [(group, min(1.0, parts[part] / size_bytes)) for group, parts in after if size_bytes]
        left = max(0.0, 1 - sum(1 - share for group, share in kept if group != SMALLER_BATCHES))
        total_bytes += size_bytes * left * prod(share for group, share in kept if group == SMALLER_BATCHES)
    return total_bytes


def _fits(job: Job, trace: Trace, budget: Budget) -> bool:
    """Return whether the replay of a trace fits the memory available at the budget's confidence."""
    run = replay_trace(trace, judge_budget(budget, job, trace).limits)
    return run.outcome is not Outcome.DOES_NOT_FIT


def _attempt(changes: tuple[Change, ...], changed: TrainingConfig, trace: Trace, budget: Budget) -> Attempt:
    estimate = estimate_batch(changed.job, trace, budget)
    needed_bytes = _needed(trace, budget.limits, estimate.run.peak_reserved_bytes)
    return Attempt(changes, changed, estimate, trace, needed_bytes)


def _needed(trace: Trace, limits: MemoryLimits, most_bytes: int) -> int:
    """Return the smallest capacity in which a trace fits, in bytes, as a multiple of 1 MiB.

    The trace is replayed in different capacities. `most_bytes` is a capacity that is known to suffice.
    """
    low = live_bytes_bound(trace.events)(trace.batch) // RESOLUTION_BYTES - 1
    high = most_bytes // RESOLUTION_BYTES + 1
    while high - low > 1:
        middle = (low + high) // 2
        run = replay_trace(trace, replace(unlimited(limits), capacity_bytes=middle * RESOLUTION_BYTES))
        reserved = -(-run.peak_reserved_bytes // RESOLUTION_BYTES)
        low, high = (middle, high) if run.outcome is Outcome.DOES_NOT_FIT else (low, min(middle, reserved))
    return high * RESOLUTION_BYTES
