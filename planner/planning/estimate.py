"""The memory of one batch size on one GPU."""

from collections.abc import Mapping
from functools import partial
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import (
    UNLIMITED,
    MemoryLimits,
    Replay,
    replay_in_rooms,
    replay_trace,
    replay_with_breakdown,
)
from planner.hardware import (
    Budget,
    estimate_oom_probability,
    judge_budget,
    process_bytes,
    upper_process_bytes,
)
from planner.jobs import Job
from planner.planning.growth_limit import StepLimit, find_step_limit
from planner.planning.retry_cost import RetryCost, count_retries
from planner.program import Category, Growth, Outcome, Trace, find_growth, pinned_bytes


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
    outcome: Outcome
    run: Replay  # under the budget where the batch fits; of a card without end where it does not
    failed: Replay | None  # the failing run in a room of the budget where the batch does not fit
    at_peak: Mapping[Category, int]  # bytes by category at the allocated peak; they add up to it
    process_bytes: int  # context and reserved peak, calibrated where that is known: what nvidia-smi shows
    process_upper_bytes: int  # the same at the confidence
    unknown_ops: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: Seconds
    p_out_of_memory: float | None = None  # by the residuals of published runs; None where nothing bounds it
    growth: Growth | None = None  # what each step leaves behind
    step_limit: StepLimit | None = None  # the steps that fit in spite of it; None where memory has no end
    retry_costs: tuple[RetryCost, ...] = ()  # of each step, where the batch fits with retries alone
    failed_bytes: int | None = None  # the memory of the allocator in `failed`; the budget's or somewhat more
    pinned_host_bytes: int = 0  # of the host, which torch pins
    ranks: tuple[RankFigures, ...] = ()  # all that were planned, where this one takes most of several


def estimate_batch(job: Job, trace: Trace, budget: Budget, trace_seconds: float = 0.0) -> Estimate:
    """Replay a trace under the budget and attribute its memory."""
    start = perf_counter()
    budget = judge_budget(budget, job, trace)
    run, at_peak = replay_with_breakdown(trace, budget.limits)
    failed, failed_bytes = None, None
    in_rooms = [(budget.limits, run)]
    if run.outcome is not Outcome.FITS:
        in_rooms += replay_in_rooms(budget.larger_limits, partial(replay_trace, trace))
    for limits, other in in_rooms:
        if failed is None and other.outcome is Outcome.DOES_NOT_FIT:
            failed, failed_bytes = other, limits.allocator_limit_bytes
    if failed is not None:
        run, at_peak = replay_with_breakdown(trace, unlimited(budget.limits))
    chance = estimate_oom_probability(budget, trace, run, in_rooms)
    growth = find_growth(trace)
    limit = None
    if growth is not None and failed is None:
        limit = find_step_limit(trace, budget.limits, growth, run.peak_reserved_bytes)
    retries = run.outcome is Outcome.FITS_WITH_RETRIES and failed is None
    costs = count_retries(trace, budget.limits) if retries else ()
    return Estimate(
        job,
        budget,
        Outcome.DOES_NOT_FIT if failed else run.outcome,
        run,
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
        failed_bytes,
        pinned_bytes(trace.pinned),
    )


def unlimited(limits: MemoryLimits) -> MemoryLimits:
    """Return limits with the same configuration and memory that never runs out."""
    return replace(UNLIMITED, config=replace(limits.config, per_process_memory_fraction=1.0))
