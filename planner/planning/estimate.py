"""Estimate the memory of one batch size on one GPU."""

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
    replay_trace,
    replay_under_limits,
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
from planner.planning.host_memory import HostMemory, count_host_memory
from planner.planning.phases import JobPhasePeak, job_phases
from planner.planning.retry_cost import RetryCost, count_retries
from planner.program import Category, Growth, Outcome, Trace, find_growth


class Answer(StrEnum):
    """The answer to whether a batch fits, graded by the probability of running out of memory."""

    FITS = "fits"  # fits at the confidence
    LIKELY = "likely_fits"  # more likely fits than not, but does not fit at the confidence
    DOES_NOT_FIT = "does_not_fit"  # more likely does not fit
    NOT_KNOWN = "not_known"  # does not fit at the confidence, and the probability is unknown


class Seconds(Struct, frozen=True):
    """The seconds that tracing and replaying took for an estimate."""

    trace: float
    replay: float


class RankFigures(Struct, frozen=True):
    """One or more ranks, and the outcome and memory figures that they share."""

    ranks: tuple[int, ...]
    outcome: Outcome
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int


class Estimate(Struct, frozen=True):
    """The estimated memory of one batch size on one GPU."""

    job: Job
    budget: Budget
    outcome: Outcome  # at the confidence, under the smallest memory limit of the budget
    answer: Answer | None  # None if nothing bounds the memory
    run: Replay  # in the likeliest memory, or in unlimited memory if the batch does not fit in the likeliest
    limits: MemoryLimits  # of `run`
    failed: Replay | None  # the failing run under a memory limit of the budget; None if the batch fits in all
    at_peak: Mapping[Category, int]  # bytes by category at the allocated peak; they add up to it
    process_bytes: int  # context and reserved peak, calibrated if a calibration is known, as in nvidia-smi
    process_upper_bytes: int  # upper bound of `process_bytes` at the confidence
    unknown_ops: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: Seconds
    p_out_of_memory: float | None = None  # by the residuals of runs: in an epoch if its samples are known,
    # else in the traced steps; None if the probability is unknown
    growth: Growth | None = None  # the memory that each step leaves allocated; None if memory does not grow
    step_limit: StepLimit | None = None  # the steps that fit in spite of growth; None if all steps fit
    retry_costs: tuple[RetryCost, ...] = ()  # of each step of `run`; empty if `run` needs no retries
    retry_costs_at_confidence: tuple[RetryCost, ...] = ()  # the same under the budget's smallest limit
    failed_bytes: int | None = None  # the allocator's memory in `failed`: the budget's or somewhat more
    phases: tuple[JobPhasePeak, ...] = ()
    host: HostMemory = HostMemory(None, 0, None, None, 0)
    ranks: tuple[RankFigures, ...] = ()  # of all planned ranks, if this estimate is of the worst of several

    @property
    def is_unlimited(self) -> bool:
        """Return whether `run` was replayed in unlimited memory because the batch is not expected to fit."""
        return self.limits.allocator_limit_bytes is None and self.answer is not None


def estimate_batch(job: Job, trace: Trace, budget: Budget, trace_seconds: float = 0.0) -> Estimate:
    """Estimate the memory of a batch by replaying its trace under the budget.

    The trace is replayed under the limits at the budget's confidence and under the likeliest limits.
    """
    start = perf_counter()
    budget = judge_budget(budget, job, trace)
    limits = budget.likely_limits
    run, at_peak = replay_with_breakdown(trace, limits)
    replays = _replays_under_limits(budget, trace, run)
    failed_bytes, failed = next(
        ((one.allocator_limit_bytes, own) for one, own in replays if own.outcome is Outcome.DOES_NOT_FIT),
        (None, None),
    )
    lived = next((own for _, own in replays if own.outcome is not Outcome.DOES_NOT_FIT), None)
    if lived is None:
        lived = replay_trace(trace, unlimited(limits))
    chance = estimate_oom_probability(budget, trace, lived, replays)
    answer = _answer(budget, chance, failed, run)
    costs: tuple[RetryCost, ...] = ()
    if run.outcome is Outcome.DOES_NOT_FIT:
        limits = unlimited(limits)
        run, at_peak = replay_with_breakdown(trace, limits)
    elif run.outcome is Outcome.FITS_WITH_RETRIES:
        costs = count_retries(trace, limits)
    sure_costs = () if failed is not None or replays[0][1].outcome is Outcome.FITS else costs
    if failed is None and replays[0][1].outcome is Outcome.FITS_WITH_RETRIES and limits != budget.limits:
        sure_costs = count_retries(trace, budget.limits)
    growth = find_growth(trace)
    limit = None
    if growth is not None and failed is None:
        limit = find_step_limit(trace, budget.limits, growth, replays[0][1].peak_reserved_bytes)
    steps = steps_of_epoch(job, trace.batch)
    ends = growth is not None and limit is not None and limit.steps < steps
    if growth is not None and ends:
        need_bytes = run.peak_reserved_bytes + (steps - growth.steps) * growth.bytes_per_step
        chance = max(chance or 0.0, oom_probability_at(budget, need_bytes))
        answer = Answer.DOES_NOT_FIT if chance >= EVEN_ODDS else Answer.LIKELY
    return Estimate(
        job,
        budget,
        Outcome.DOES_NOT_FIT if failed or ends else replays[0][1].outcome,
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
        job_phases(job, trace, run, unlimited(limits)),
        count_host_memory(job, trace),
    )


def _replays_under_limits(
    budget: Budget, trace: Trace, expected: Replay
) -> list[tuple[MemoryLimits, Replay]]:
    """Return the replays of a trace under the memory limits of a budget, each with its limits.

    The limit at the budget's confidence comes first. If the trace fits under it without retries, no other
    limit is tried. `expected` is the replay under the likeliest limit.
    """
    likely, limit_bytes = budget.likely_limits, max_reserved_bytes(budget.limits)
    is_undisturbed = expected.outcome is Outcome.FITS and is_limit_independent(likely)
    if is_undisturbed and (limit_bytes is None or expected.peak_reserved_bytes <= limit_bytes):
        return [(budget.limits, expected)]
    first = expected if likely == budget.limits else replay_trace(trace, budget.limits)
    if first.outcome is Outcome.FITS:
        return [(budget.limits, first)]
    others = [limits for limits in budget.larger_limits if limits != likely]
    further = replay_under_limits(others, partial(replay_trace, trace))
    return [(budget.limits, first), *further, (likely, expected)]


def _answer(budget: Budget, chance: float | None, failed: Replay | None, expected: Replay) -> Answer | None:
    """Return the answer for a batch, or None if the budget has no memory limit.

    `chance` is the probability of running out of memory, None if it is unknown. `failed` is a failing replay
    under a limit of the budget, `expected` the replay under the likeliest limit.
    """
    if budget.limits.allocator_limit_bytes is None:
        return None
    fails = expected.outcome is Outcome.DOES_NOT_FIT
    if fails or (chance is not None and failed is not None and chance >= EVEN_ODDS):
        return Answer.DOES_NOT_FIT
    if failed is None:
        return Answer.FITS
    return Answer.NOT_KNOWN if chance is None else Answer.LIKELY


def unlimited(limits: MemoryLimits) -> MemoryLimits:
    """Return limits of unlimited memory, with the allocator configuration of `limits` and a fraction of 1."""
    return replace(UNLIMITED, config=replace(limits.config, per_process_memory_fraction=1.0))
