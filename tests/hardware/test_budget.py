"""The allocator's part of a GPU, and the upper bound of a process."""

from math import hypot, inf, nan
from statistics import NormalDist

import pytest
from hypothesis import given, strategies as st

from planner.allocator.config import MIB, AllocatorConfig, MemoryLimits
from planner.allocator.replay import replay_trace
from planner.errors import UsageError
from planner.hardware.budget import make_budget, upper_process_bytes
from planner.hardware.device import Device, SourcedBytes, unlimited_device
from planner.hardware.likeness import Likeness, margins_of
from planner.hardware.oom_probability import estimate_oom_probability, oom_probability_at, probability_beyond
from planner.hardware.residuals import RunKind, Spread
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from tests.helpers.structs import replace

RULES = AllocatorConfig()
ONE_DEVIATION = NormalDist().cdf(1)  # 84 %: the confidence at which z is 1
VERDICTS = margins_of(Likeness()).verdicts
SCALE = 1 + VERDICTS.location + VERDICTS.scale  # of a need, one deviation above its mean


def card(usable_mib: int = 10_000, context_mib: int = 400) -> Device:
    """A GPU whose two uncertainties, 30 and 40 MiB, make 50 together."""
    return Device(
        name="card",
        total=SourcedBytes(10_240 * MIB, "made up"),
        usable=SourcedBytes(usable_mib * MIB, "made up", spread=30 * MIB),
        context=SourcedBytes(context_mib * MIB, "made up", spread=40 * MIB),
        capability=(8, 6),
    )


def test_even_odds_leave_no_margin() -> None:
    """At confidence 0.5 the allocator gets all that the context leaves, and a cap counts in full."""
    budget = make_budget(card(), 0.5, RULES, 2_000 * MIB)
    assert budget.limits == MemoryLimits(9_600 * MIB, 2_000 * MIB, 10_000 * MIB, RULES)
    assert (budget.device, budget.confidence, budget.cap_bytes) == (card(), 0.5, 2_000 * MIB)


def test_one_deviation_by_hand() -> None:
    """At one deviation a need's mean and the deviation of it, GPU and context together fill the GPU; a cap
    is divided by what one deviation makes of a need.
    """
    limits = make_budget(card(), ONE_DEVIATION, RULES, 2_000 * MIB).limits
    need = (limits.capacity_bytes or 0) / MIB
    taken = (1 + VERDICTS.location) * need + hypot(50, VERDICTS.scale * need)
    assert taken == pytest.approx(9_600, abs=0.001)
    assert limits.limit_bytes == int(2_000 * MIB / SCALE)
    assert limits.total_bytes == int(10_000 * MIB / SCALE)


@given(
    st.integers(0, 200_000),
    st.integers(0, 3_000),
    st.integers(0, 300),
    st.integers(0, 300),
    st.floats(0.5, 1, exclude_max=True),
)
def test_margin(
    usable: int, context: int, usable_spread: int, context_spread: int, confidence: float
) -> None:
    """The capacity is the largest need of which the chance to pass the GPU is at most what the confidence
    leaves, and never more than the card without its context.
    """
    device = replace(
        card(),
        usable=SourcedBytes(usable * MIB, "made up", spread=usable_spread * MIB),
        context=SourcedBytes(context * MIB, "made up", spread=context_spread * MIB),
    )
    capacity = make_budget(device, confidence, RULES).limits.capacity_bytes
    assert capacity is not None
    z = NormalDist().inv_cdf(confidence)
    left = (usable - context) * MIB

    def taken(need: float) -> float:
        others = hypot(usable_spread * MIB, context_spread * MIB)
        return (1 + VERDICTS.location) * need + z * hypot(others, VERDICTS.scale * need)

    slack = 1e-9 * max(1, abs(left))  # for floating point
    assert capacity == 0 or taken(capacity) <= left + slack
    assert taken(capacity + 1) > left - slack or capacity == int(left)


@given(st.floats(0.5, 1, exclude_max=True), st.floats(0.5, 1, exclude_max=True), st.integers(2, 20_000))
def test_more_confidence_leaves_less(one: float, other: float, cap_mib: int) -> None:
    """The surer the answer, the less the allocator gets of the GPU and of a cap."""
    low, high = (
        make_budget(card(), confidence, RULES, cap_mib * MIB).limits for confidence in sorted((one, other))
    )
    assert low.capacity_bytes is not None and high.capacity_bytes is not None
    assert low.limit_bytes is not None and high.limit_bytes is not None
    assert high.capacity_bytes <= low.capacity_bytes <= 9_600 * MIB
    assert high.limit_bytes <= low.limit_bytes <= cap_mib * MIB


def test_a_cap_leaves_the_card_as_it_is() -> None:
    """A cap bounds the allocator alone: context and driver count against the GPU only."""
    free = make_budget(card(), 0.99, RULES).limits
    capped = make_budget(card(), 0.99, RULES, 500 * MIB).limits
    assert replace(capped, limit_bytes=None) == free
    assert capped.limit_bytes == int(
        500 * MIB / (1 + VERDICTS.location + NormalDist().inv_cdf(0.99) * VERDICTS.scale)
    )


def test_a_fraction_of_the_configuration_is_a_cap() -> None:
    """Memory left, probability of running out and upper bound are those of a cap of the same size."""
    half = AllocatorConfig(per_process_memory_fraction=0.5)
    by_config = make_budget(card(), 0.99, half)
    capped = make_budget(card(), 0.99, RULES, 5_000 * MIB)
    assert by_config.limits.allocator_limit_bytes == pytest.approx(capped.limits.limit_bytes, abs=1)
    for need_mib in (4_000, 4_900, 5_100):
        chances = {oom_probability_at(budget, need_mib * MIB) for budget in (by_config, capped)}
        uppers = {upper_process_bytes(budget, need_mib * MIB) for budget in (by_config, capped)}
        assert len(chances) == len(uppers) == 1
    with pytest.raises(UsageError, match="is of a GPU's memory; give --gpu NAME or --gpu-mib N"):
        make_budget(unlimited_device(), 0.99, half, 5_000 * MIB)


def test_endless_memory() -> None:
    """A GPU without end has no capacity, and a fraction no total; a cap bounds it all the same."""
    assert make_budget(unlimited_device(), 0.99, RULES).limits == MemoryLimits(None, None, None, RULES)
    assert make_budget(unlimited_device(), 0.5, RULES, 500 * MIB).limits == MemoryLimits(
        None, 500 * MIB, None, RULES
    )


def test_a_card_smaller_than_a_context() -> None:
    """If the context alone is larger than the GPU, nothing is left, not less."""
    assert make_budget(card(300, 400), 0.5, RULES).limits.capacity_bytes == 0


def test_rules_are_passed_on() -> None:
    """The allocator's options reach the memory limits."""
    config = AllocatorConfig(expandable_segments=True)
    assert make_budget(card(), 0.99, config).limits.config == config


@pytest.mark.parametrize("confidence", [0.0, 0.49, 1.0, 1.5, 99, -1.0, nan, inf])
def test_confidence_is_refused(confidence: float) -> None:
    """A confidence below one half, of one or more, or of no number is refused."""
    with pytest.raises(UsageError) as caught:
        make_budget(card(), confidence, RULES)
    assert str(caught.value) == (
        f"--confidence {confidence}: give a probability from 0.5 to below 1, such as 0.99"
    )


@pytest.mark.parametrize("cap_bytes", [2 * MIB - 1, 0, -1])
def test_cap_is_refused(cap_bytes: int) -> None:
    """A cap below the allocator's smallest segment is refused."""
    with pytest.raises(UsageError) as caught:
        make_budget(card(), 0.99, RULES, cap_bytes)
    assert str(caught.value) == (
        "--allocator-cap-mib: the allocator takes 2 MiB at the least; give a larger cap"
    )


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("reserved_mib", [3_000, 9_601])
@pytest.mark.parametrize("kind", list(RunKind))
def test_upper_bound(confidence: float, reserved_mib: int, kind: RunKind) -> None:
    """The reserved peak counts with the ratio that so many published runs of its kind stayed within, or once
    where that is less, in a process with room on the card as in one that needs more than the card has.
    """
    budget = make_budget(card(50_000), confidence, RULES, None, None, Likeness(kind))
    ratio = margins_of(Likeness(kind)).peak_ratio(confidence)
    z = NormalDist().inv_cdf(confidence)
    upper = upper_process_bytes(budget, reserved_mib * MIB)
    assert upper == int((400 + z * 40) * MIB + ratio * reserved_mib * MIB)


def test_upper_bound_of_a_full_card() -> None:
    """A process that fits shows no more than the GPU has."""
    assert upper_process_bytes(make_budget(card(), 0.99, RULES), 9_600 * MIB) == 10_000 * MIB


@given(
    st.floats(0.5, 1, exclude_max=True),
    st.floats(0.5, 1, exclude_max=True),
    st.integers(0, 12_000),
    st.one_of(st.none(), st.integers(2, 12_000)),
)
def test_upper_bounds(one: float, other: float, reserved_mib: int, cap_mib: int | None) -> None:
    """The upper bound is at least context and reserved peak, rises with the confidence, and passes the GPU
    or the cap only where the process does.
    """
    cap_bytes = None if cap_mib is None else cap_mib * MIB
    low, high = (
        upper_process_bytes(make_budget(card(), confidence, RULES, cap_bytes), reserved_mib * MIB)
        for confidence in sorted((one, other))
    )
    process_bytes = (400 + reserved_mib) * MIB
    assert process_bytes <= low <= high
    assert high <= 10_000 * MIB or process_bytes > 10_000 * MIB
    if cap_mib is not None:
        z = NormalDist().inv_cdf(max(one, other))
        assert high <= (400 + z * 40 + max(cap_mib, reserved_mib)) * MIB + 1


# ---- the probability that a batch runs out of memory


def test_chance_by_hand() -> None:
    """A need of 100 with a deviation of 3 beside one of 4 passes 105, a deviation of 5 away, in 15.9 %."""
    assert probability_beyond(105, 100, Spread(1, 0.0, 0.03), 4.0) == pytest.approx(1 - ONE_DEVIATION)


def test_chance_moves_with_the_mean() -> None:
    """Runs that need 5 % more than their replay on average fill 105 at a need of 100 in half of the cases."""
    assert probability_beyond(105, 100, Spread(1, 0.05, 0.03), 4.0) == pytest.approx(0.5)


@given(
    st.floats(0.5, 0.999), st.sampled_from(list(RunKind)), st.one_of(st.none(), st.integers(3_000, 12_000))
)
def test_chance_and_confidence_agree(confidence: float, kind: RunKind, cap_mib: int | None) -> None:
    """The budget at a confidence is passed with the probability that the confidence leaves, or a smaller one
    where the card's or the cap's own size bounds it.
    """
    cap_bytes = None if cap_mib is None else cap_mib * MIB
    budget = make_budget(card(), confidence, RULES, cap_bytes, None, Likeness(kind))
    bounds = [
        bound for bound in (budget.limits.capacity_bytes, budget.limits.limit_bytes) if bound is not None
    ]
    assert oom_probability_at(budget, min(bounds)) <= 1 - confidence + 1e-6


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_more_need_is_no_safer(one: int, other: int) -> None:
    """The probability rises with the need."""
    budget = make_budget(card(), 0.99, RULES)
    low, high = sorted((one, other))
    assert 0 <= oom_probability_at(budget, low * MIB) <= oom_probability_at(budget, high * MIB) <= 1


def blocks(size_mib: int) -> Trace:
    """Return a trace of a block that is freed before one of twice its size: the first can be released."""
    size = size_mib * MIB
    events = (
        PhaseStart(0, Phase.SETUP),
        PhaseStart(1, Phase.FORWARD),
        Alloc(0, size, Category.TEMPORARY, 0),
        Free(0),
        Alloc(1, 2 * size, Category.TEMPORARY, 0),
        Free(1),
        PhaseStart(1, Phase.END),
    )
    return Trace(events, (Site("", "aten.add.Tensor"),), 1)


def test_nothing_bounds_a_card_without_end() -> None:
    """Without a GPU and without a cap no batch runs out of memory, and no probability is reported."""
    run = replay_trace(blocks(100))
    assert estimate_oom_probability(make_budget(unlimited_device(), 0.99, RULES), blocks(100), run) is None


@pytest.mark.parametrize(
    ("size_mib", "least", "most"), [(1_000, 0, 0.0005), (4_300, 0, 0.01), (5_000, 0.95, 1)]
)
def test_what_can_be_released_is_not_needed(size_mib: int, least: float, most: float) -> None:
    """3,000 of 9,600 MiB reserved are safe; so are 12,900 of which 4,300 can be released; 10,000 are not."""
    run = replay_trace(blocks(size_mib))
    assert run.peak_reserved_bytes == 3 * size_mib * MIB
    chance = estimate_oom_probability(make_budget(card(), 0.99, RULES), blocks(size_mib), run)
    assert chance is not None and least <= chance <= most


def test_what_a_kernel_can_do_without_is_not_needed() -> None:
    """Tensors of 5,000 of 9,600 MiB are safe though a kernel would like 6,000 more beside them."""
    workspace = Alloc(1, 6_000 * MIB, Category.WORKSPACE, 0, may_fail=True)
    events = (
        PhaseStart(1, Phase.FORWARD),
        Alloc(0, 5_000 * MIB, Category.TEMPORARY, 0),
        workspace,
        Free(1),
    )
    trace = Trace((*events, PhaseStart(1, Phase.END)), (Site("", "aten.convolution_backward.default"),), 1)
    run = replay_trace(trace)
    assert run.peak_allocated_bytes == 11_000 * MIB
    chance = estimate_oom_probability(make_budget(card(), 0.99, RULES), trace, run)
    assert chance is not None and chance < 0.0005
