"""The memory of one batch size on one GPU."""

from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import (
    UNLIMITED,
    MemoryLimits,
    Replay,
    is_limit_independent,
    max_reserved_bytes,
    replay_in_rooms,
    replay_trace,
    replay_with_breakdown,
)
from planner.hardware import (
    EVEN_ODDS,
    Budget,
    estimate_oom_probability,
    judge_budget,
    oom_probability_at,
    process_bytes,
    upper_process_bytes,
)
from planner.jobs import Job
from planner.planning.epoch import steps_of_epoch
from planner.planning.growth_limit import StepLimit, find_step_limit
from planner.planning.retry_cost import RetryCost, count_retries
from planner.program import Category, Growth, Outcome, Trace, find_growth, pinned_bytes


class Answer(StrEnum):
    """Whether a batch fits, in as many words as its probability allows."""

    FITS = "fits"  # at the confidence
    LIKELY = "likely_fits"  # more likely than not, and not at the confidence
    DOES_NOT_FIT = "does_not_fit"  # more likely not
    NOT_KNOWN = "not_known"  # no run tells how likely it is


class Seconds(Struct, frozen=True):
    """The time of an estimate by its parts."""

    trace: float
    replay: float


class RankFigures(Struct, frozen=True):
    """The memory of ranks that are alike."""

    ranks: tuple[int, ...]
    outcome: Outcome
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int


class Estimate(Struct, frozen=True):
    """The memory of one batch size on one card."""

    job: Job
    budget: Budget
    outcome: Outcome  # at the confidence, in the least memory that there is with it
    answer: Answer | None  # None where nothing bounds the memory
    run: Replay  # on the GPU as it is; on one without end where the batch is not expected to fit
    limits: MemoryLimits  # of `run`
    failed: Replay | None  # the failing run in a room of the budget where the batch does not fit
    at_peak: Mapping[Category, int]  # bytes by category at the allocated peak; they add up to it
    process_bytes: int  # context and reserved peak, calibrated where that is known: what nvidia-smi shows
    process_upper_bytes: int  # the same at the confidence
    unknown_ops: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: Seconds
    p_out_of_memory: float | None = None  # by the residuals of runs, to the end of an epoch whose samples are
    # known, else in the traced steps; None where nothing bounds it
    growth: Growth | None = None  # what each step leaves behind
    step_limit: StepLimit | None = None  # the steps that fit in spite of it; None where memory has no end
    retry_costs: tuple[RetryCost, ...] = ()  # of each step of `run`, if it needs any
    retry_costs_at_confidence: tuple[RetryCost, ...] = ()  # in the memory that there is with the confidence
    failed_bytes: int | None = None  # the memory of the allocator in `failed`; the budget's or somewhat more
    pinned_host_bytes: int = 0  # of the host, which torch pins
    ranks: tuple[RankFigures, ...] = ()  # all that were planned, where this one takes most of several

    @property
    def is_unlimited(self) -> bool:
        """Return whether the figures are of a GPU without end: the batch is not expected to fit."""
        return self.limits.allocator_limit_bytes is None and self.answer is not None


def estimate_batch(job: Job, trace: Trace, budget: Budget, trace_seconds: float = 0.0) -> Estimate:
    """Replay a trace under the budget, and on the GPU as it is expected to be, and attribute its memory."""
    start = perf_counter()
    budget = judge_budget(budget, job, trace)
    limits = budget.likely_limits
    run, at_peak = replay_with_breakdown(trace, limits)
    in_rooms = _replays_in_rooms(budget, trace, run)
    failed_bytes, failed = next(
        ((room.allocator_limit_bytes, own) for room, own in in_rooms if own.outcome is Outcome.DOES_NOT_FIT),
        (None, None),
    )
    lived = next((own for _, own in in_rooms if own.outcome is not Outcome.DOES_NOT_FIT), None)
    if lived is None:
        lived = replay_trace(trace, unlimited(limits))
    chance = estimate_oom_probability(budget, trace, lived, in_rooms)
    answer = _answer(budget, chance, failed, run)
    costs: tuple[RetryCost, ...] = ()
    if run.outcome is Outcome.DOES_NOT_FIT:
        limits = unlimited(limits)
        run, at_peak = replay_with_breakdown(trace, limits)
    elif run.outcome is Outcome.FITS_WITH_RETRIES:
        costs = count_retries(trace, limits)
    sure_costs = () if failed is not None or in_rooms[0][1].outcome is Outcome.FITS else costs
    if failed is None and in_rooms[0][1].outcome is Outcome.FITS_WITH_RETRIES and limits != budget.limits:
        sure_costs = count_retries(trace, budget.limits)
    growth = find_growth(trace)
    limit = None
    if growth is not None and failed is None:
        limit = find_step_limit(trace, budget.limits, growth, in_rooms[0][1].peak_reserved_bytes)
    steps = steps_of_epoch(job, trace.batch)
    ends = growth is not None and limit is not None and limit.steps < steps
    if growth is not None and ends:
        need_bytes = run.peak_reserved_bytes + (steps - growth.steps) * growth.bytes_per_step
        chance = max(chance or 0.0, oom_probability_at(budget, need_bytes))
        answer = Answer.DOES_NOT_FIT if chance >= EVEN_ODDS else Answer.LIKELY
    return Estimate(
        job,
        budget,
        Outcome.DOES_NOT_FIT if failed or ends else in_rooms[0][1].outcome,
        answer,
        run,
        limits,
        failed,
        at_peak,
        process_bytes(budget, run.peak_reserved_bytes),
        upper_process_bytes(budget, run.peak_reserved_bytes),
        trace.unknown_ops,
        trace.notes,
        Seconds(trace_seconds, perf_counter() - start),
        chance,
        growth,
        limit,
        costs,
        sure_costs,
        failed_bytes,
        pinned_bytes(trace.pinned),
    )


def _replays_in_rooms(budget: Budget, trace: Trace, expected: Replay) -> list[tuple[MemoryLimits, Replay]]:
    """Return the replays in the rooms of a budget, the one at its confidence first; `expected` is the replay
    in the likely room.
    """
    likely, room_bytes = budget.likely_limits, max_reserved_bytes(budget.limits)
    is_undisturbed = expected.outcome is Outcome.FITS and is_limit_independent(likely)
    if is_undisturbed and (room_bytes is None or expected.peak_reserved_bytes <= room_bytes):
        return [(budget.limits, expected)]
    first = expected if likely == budget.limits else replay_trace(trace, budget.limits)
    if first.outcome is Outcome.FITS:
        return [(budget.limits, first)]
    others = [limits for limits in budget.larger_limits if limits != likely]
    rooms = replay_in_rooms(others, partial(replay_trace, trace))
    return [(budget.limits, first), *rooms, (likely, expected)]


def _answer(budget: Budget, chance: float | None, failed: Replay | None, expected: Replay) -> Answer | None:
    """Return what is said of a batch with this probability of running out of memory, None if it has none."""
    if budget.limits.allocator_limit_bytes is None:
        return None
    fails = expected.outcome is Outcome.DOES_NOT_FIT
    if fails or (chance is not None and failed is not None and chance >= EVEN_ODDS):
        return Answer.DOES_NOT_FIT
    if failed is None:
        return Answer.FITS
    return Answer.NOT_KNOWN if chance is None else Answer.LIKELY


def unlimited(limits: MemoryLimits) -> MemoryLimits:
    """Return limits with the same configuration and memory that never runs out."""
    return replace(UNLIMITED, config=replace(limits.config, per_process_memory_fraction=1.0))
