"""Batches that fit with retries where the allocator's memory is not known to the byte."""

import pytest
from hypothesis import given, strategies as st

from planner.allocator.config import AllocatorConfig, MemoryLimits
from planner.allocator.replay import replay_trace
from planner.allocator.several_limits import replay_under_limits
from planner.hardware.budget import OTHER_LIMITS, Budget, make_budget
from planner.hardware.device import MIB, Device, FigureKind, SourcedBytes, unlimited_device
from planner.hardware.oom_probability import oom_probability_at
from planner.jobs import Job
from planner.planning.batch_curve import take_curve
from planner.planning.estimate import estimate_batch
from planner.planning.search.fleet import fit_devices
from planner.planning.search.max_batch import find_max_batch
from planner.program.events import Alloc, Category, Free, Outcome, Phase, PhaseStart, Trace
from planner.program.program import AffineAlloc, Program, ProgramEvent
from planner.report.commands.estimates.verdict import failure_entries
from tests.helpers.models import AMPERE
from tests.helpers.traces import SITES, OneProgram, program_of, programs

JOB = Job.create("made up")


def budget_at(confidence: float, usable_mib: int = 10_000, cap_mib: int | None = None) -> Budget:
    """Return the budget of a GPU whose only uncertainty is the need of runs."""
    exact, nothing = (SourcedBytes(n * MIB, "made up", kind=FigureKind.MEASURED) for n in (usable_mib, 0))
    card = Device("card", exact, exact, nothing, AMPERE)
    return make_budget(card, confidence, AllocatorConfig(), None if cap_mib is None else cap_mib * MIB)


def block(number: int, mib_per_sample: int) -> AffineAlloc:
    return AffineAlloc(number, 0, mib_per_sample * MIB, Category.TEMPORARY, 0)


def holed() -> Program:
    """Return a program that runs in 27 MiB a sample, in 30 and more, and not in 28 or 29.

    Below 28 MiB, the first block is released for the second, and the third has a segment of its own size.
    From 28 on it takes a part of the first block's segment, which then is not released for the fourth.
    """
    events: tuple[ProgramEvent, ...] = (
        PhaseStart(0, Phase.SETUP),
        PhaseStart(1, Phase.FORWARD),
        block(0, 12),
        Free(0),
        block(1, 16),
        block(2, 9),
        Free(1),
        block(3, 18),
        PhaseStart(1, Phase.END),
    )
    return program_of(events)


@st.composite
def churns(draw: st.DrawFn) -> Program:
    """Few large blocks, most of them freed: many of these programs run in one limits and not in a larger."""
    events: list[ProgramEvent] = [PhaseStart(0, Phase.SETUP), PhaseStart(1, Phase.FORWARD)]
    alive: list[int] = []
    for number, size in enumerate(draw(st.lists(st.integers(6, 20), min_size=3, max_size=7))):
        events.append(block(number, size))
        alive.append(number)
        for _ in range(draw(st.integers(0, len(alive)))):
            events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
    return program_of([*events, PhaseStart(1, Phase.END)])


def fits_in_rooms(trace: Trace, budget: Budget) -> bool:
    """Return whether each limits by itself is enough."""
    return all(
        replay_trace(trace, limits).outcome is not Outcome.DOES_NOT_FIT for limits in budget.all_limits
    )


def test_the_program_is_not_monotone_in_its_memory() -> None:
    """It is what the tests below are about."""
    trace = holed().instantiate(10)
    outcomes = [
        replay_trace(trace, MemoryLimits(limits * MIB)).outcome for limits in (260, 270, 280, 290, 300)
    ]
    no, retries = Outcome.DOES_NOT_FIT, Outcome.FITS_WITH_RETRIES
    assert outcomes == [no, retries, no, no, retries]


@pytest.mark.parametrize("confidence", [0.5, 0.7, 0.9, 0.99, 0.9999])
def test_the_answer_is_the_largest_that_fits_under_all_limits(confidence: float) -> None:
    """No batch size above it does, by brute force, though some fit in the smallest limits."""
    program, budget = holed(), budget_at(confidence)
    (fit,) = fit_devices(JOB, [budget], OneProgram(program))  # type: ignore[arg-type]
    fitting = [batch for batch in range(1, 400) if fits_in_rooms(program.instantiate(batch), fit.budget)]
    assert fit.max_batch == max(fitting)
    above = (
        replay_trace(program.instantiate(batch), fit.budget.limits) for batch in range(max(fitting) + 1, 400)
    )
    assert any(run.outcome is Outcome.FITS_WITH_RETRIES for run in above) is (confidence > 0.9)


@pytest.mark.slow
@given(st.one_of(churns(), programs()), st.integers(100, 9_000), st.sampled_from([0.5, 0.8, 0.99]))
def test_any_answer_fits_in_all_rooms(program: Program, usable_mib: int, confidence: float) -> None:
    """So does the one without retries, and the successor of the larger one does not."""
    budget, source = budget_at(confidence, usable_mib), OneProgram(program)
    (fit,) = fit_devices(JOB, [budget], source)  # type: ignore[arg-type]
    for batch in {fit.max_batch, fit.comfortable_batch} - {0}:
        assert fits_in_rooms(program.instantiate(batch), fit.budget)
    assert fit.comfortable_batch <= fit.max_batch
    if fit.max_batch < 2**24:
        assert not fits_in_rooms(program.instantiate(fit.max_batch + 1), fit.budget)


@given(churns(), st.integers(100, 9_000), st.integers(0, 40))
def test_estimates_agree_with_the_search(program: Program, usable_mib: int, more: int) -> None:
    """An estimate, a row of `gpus` and a point of the curve have one outcome; what does not fit runs out of
    memory more often than the confidence allows.
    """
    source = OneProgram(program)
    plan = find_max_batch(JOB, budget_at(0.99, usable_mib), source)  # type: ignore[arg-type]
    budget, batch = plan.budget, plan.search.largest + more or 1
    trace = program.instantiate(batch)
    estimate = estimate_batch(JOB, trace, budget)
    assert (estimate.outcome is not Outcome.DOES_NOT_FIT) is fits_in_rooms(trace, budget)
    (fit,) = fit_devices(JOB, [budget], source, batch)  # type: ignore[arg-type]
    (card,) = take_curve([(budget, None)], source, batch).curves  # type: ignore[arg-type]
    points = {point.batch: point.outcome for point in card.points}
    assert fit.outcome is points[batch] is estimate.outcome
    assert (estimate.failed is None) is (estimate.outcome is not Outcome.DOES_NOT_FIT)
    chance = estimate.p_out_of_memory
    if chance is not None and estimate.failed is not None:
        assert chance > 1 - budget.confidence - 1e-6


def test_limits_that_fail_count_in_the_probability() -> None:
    """The batch fits where memory is least; the larger limits under which it fails make its probability."""
    program, budget = holed(), budget_at(0.99)
    plan = find_max_batch(JOB, budget, OneProgram(program))  # type: ignore[arg-type]
    budget = plan.budget
    batch = (budget.limits.capacity_bytes or 0) * 2 // (55 * MIB)
    outcomes = [replay_trace(program.instantiate(batch), limits).outcome for limits in budget.all_limits]
    assert outcomes[0] is not Outcome.DOES_NOT_FIT
    failing = sum(outcome is Outcome.DOES_NOT_FIT for outcome in outcomes[1:])
    estimate = estimate_batch(JOB, program.instantiate(batch), budget)
    assert estimate.failed_bytes == (budget.all_limits[-1].capacity_bytes or 0)
    (entry,) = failure_entries(estimate)
    size_text = f"{(estimate.failed_bytes or 0) / MIB:,.1f} MiB"
    assert f"where the allocator has {size_text}, which is as probable" in str(entry)
    chance = estimate.p_out_of_memory
    assert failing
    assert chance is not None
    assert failing * 0.98 / OTHER_LIMITS <= chance + 1e-9


@given(churns(), st.lists(st.integers(10, 140), min_size=1, max_size=9), st.booleans())
def test_a_replay_stands_for_rooms_where_it_goes_alike(
    program: Program, sizes: list[int], is_cap: bool
) -> None:
    """Each limits has the replay that it has by itself, failures and retries included."""
    trace = program.instantiate(1)
    several = [MemoryLimits(None, n * MIB) if is_cap else MemoryLimits(n * MIB) for n in sizes]
    found = list(replay_under_limits(several, lambda limits: replay_trace(trace, limits)))
    assert sorted(limits.allocator_limit_bytes or 0 for limits, _ in found) == sorted(n * MIB for n in sizes)
    for limits, run in found:
        assert run == replay_trace(trace, limits)


# ---- the limits of a budget


def test_even_odds_have_one_room() -> None:
    """The likeliest memory is what it is."""
    assert budget_at(0.5).larger_limits == ()


@given(st.floats(0.51, 0.999), st.one_of(st.none(), st.integers(1_000, 9_000)))
def test_limits_are_as_probable_as_their_confidences(confidence: float, cap_mib: int | None) -> None:
    """They rise in equal steps of probability, from the confidence to its complement."""
    budget = budget_at(confidence, cap_mib=cap_mib)
    sizes = [limits.allocator_limit_bytes or 0 for limits in budget.all_limits]
    assert len(sizes) == OTHER_LIMITS + 1
    assert sizes == sorted(sizes)
    step = (2 * confidence - 1) / OTHER_LIMITS
    for number, size in enumerate(sizes):
        expected = 1 - confidence + number * step
        assert oom_probability_at(budget, size) == pytest.approx(expected, abs=1e-4)


def test_unlimited_memory_has_one_limit() -> None:
    """There is nothing to be unsure of if nothing bounds the allocator."""
    trace = Trace((Alloc(0, 512, Category.TEMPORARY, 0),), SITES, 1)
    budget = make_budget(unlimited_device(), 0.99, AllocatorConfig())
    assert {limits.allocator_limit_bytes for limits in budget.all_limits} == {None}
    assert estimate_batch(JOB, trace, budget).outcome is Outcome.FITS
