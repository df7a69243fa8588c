"""What of a card is left to the allocator, and what a process shows at most."""

from dataclasses import replace
from math import hypot, inf, nan
from statistics import NormalDist

import pytest
from handmade import UNTIMED
from hypothesis import given
from hypothesis import strategies as st

from planner.allocator_rules import MIB, AllocatorRules
from planner.budget import PEAK_RATIO_QUANTILES, VERDICT_SPREAD, make_budget, upper_process_bytes
from planner.device import Device, Measured, unlimited_device
from planner.errors import UsageError
from planner.replay import Arena

RULES = AllocatorRules()
ONE_DEVIATION = NormalDist().cdf(1)  # 84 %: the confidence at which z is 1


def card(usable_mib: int = 10_000, context_mib: int = 400) -> Device:
    """A card whose two uncertainties, 30 and 40 MiB, make 50 together."""
    return Device(
        name="card",
        total=Measured(10_240 * MIB, "made up"),
        usable=Measured(usable_mib * MIB, "made up", spread=30 * MIB),
        context=Measured(context_mib * MIB, "made up", spread=40 * MIB),
        capability=(8, 6),
    )


def test_even_odds_leave_no_margin() -> None:
    """At confidence 0.5 the allocator gets all that the context leaves, and a cap counts in full."""
    budget = make_budget(card(), 0.5, RULES, 2_000 * MIB)
    assert budget.arena == Arena(9_600 * MIB, 2_000 * MIB, 10_000 * MIB, RULES)
    assert (budget.device, budget.confidence, budget.cap_bytes) == (card(), 0.5, 2_000 * MIB)


def test_one_deviation_by_hand() -> None:
    """At one deviation, 50 MiB less are left, and all is divided by one spread of the verdicts more."""
    arena = make_budget(card(), ONE_DEVIATION, RULES, 2_000 * MIB).arena
    assert arena.capacity_bytes == int(9_550 * MIB / (1 + VERDICT_SPREAD))
    assert arena.limit_bytes == int(2_000 * MIB / (1 + VERDICT_SPREAD))
    assert arena.total_bytes == int(10_000 * MIB / (1 + VERDICT_SPREAD))


@UNTIMED
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
    """The capacity is the largest for which it, the context and z deviations of all of them fit the card."""
    device = replace(
        card(),
        usable=Measured(usable * MIB, "made up", spread=usable_spread * MIB),
        context=Measured(context * MIB, "made up", spread=context_spread * MIB),
    )
    capacity = make_budget(device, confidence, RULES).arena.capacity_bytes
    assert capacity is not None
    z = NormalDist().inv_cdf(confidence)

    def needed(allocator_bytes: int) -> float:
        others = context * MIB + z * hypot(usable_spread * MIB, context_spread * MIB)
        return allocator_bytes * (1 + z * VERDICT_SPREAD) + others

    slack = 0.001  # of a byte, for floating point
    assert capacity == 0 or needed(capacity) <= usable * MIB + slack
    assert needed(capacity + 1) > usable * MIB - slack


@UNTIMED
@given(st.floats(0.5, 1, exclude_max=True), st.floats(0.5, 1, exclude_max=True), st.integers(2, 20_000))
def test_more_confidence_leaves_less(one: float, other: float, cap_mib: int) -> None:
    """The surer the answer, the less the allocator gets of the card and of a cap."""
    low, high = (
        make_budget(card(), confidence, RULES, cap_mib * MIB).arena for confidence in sorted((one, other))
    )
    assert low.capacity_bytes is not None and high.capacity_bytes is not None
    assert low.limit_bytes is not None and high.limit_bytes is not None
    assert high.capacity_bytes <= low.capacity_bytes <= 9_600 * MIB
    assert high.limit_bytes <= low.limit_bytes <= cap_mib * MIB


def test_a_cap_leaves_the_card_as_it_is() -> None:
    """A cap bounds the allocator alone: context and driver count against the card only."""
    free = make_budget(card(), 0.99, RULES).arena
    capped = make_budget(card(), 0.99, RULES, 500 * MIB).arena
    assert replace(capped, limit_bytes=None) == free
    assert capped.limit_bytes == int(500 * MIB / (1 + NormalDist().inv_cdf(0.99) * VERDICT_SPREAD))


def test_endless_memory() -> None:
    """A card without end has no capacity, and a fraction no total; a cap bounds it all the same."""
    assert make_budget(unlimited_device(), 0.99, RULES).arena == Arena(None, None, None, RULES)
    assert make_budget(unlimited_device(), 0.5, RULES, 500 * MIB).arena == Arena(None, 500 * MIB, None, RULES)


def test_a_card_smaller_than_a_context() -> None:
    """Where the context alone is larger than the card, nothing is left, not less."""
    assert make_budget(card(300, 400), 0.5, RULES).arena.capacity_bytes == 0


def test_rules_are_passed_on() -> None:
    """The allocator's options reach the arena."""
    rules = AllocatorRules(expandable_segments=True)
    assert make_budget(card(), 0.99, rules).arena.rules == rules


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


def test_upper_bound_at_even_odds() -> None:
    """At confidence 0.5 a process shows its context and what half of the published runs stayed within."""
    median = dict(PEAK_RATIO_QUANTILES)[0.5]
    upper = upper_process_bytes(make_budget(card(), 0.5, RULES), 3_000 * MIB)
    assert upper == int(400 * MIB + median * 3_000 * MIB)


@pytest.mark.parametrize(
    ("probability", "ratio"), [pair for pair in PEAK_RATIO_QUANTILES if 0.5 < pair[0] < 1]
)
@pytest.mark.parametrize("reserved_mib", [3_000, 9_601])
def test_upper_bound_at_the_quantiles(probability: float, ratio: float, reserved_mib: int) -> None:
    """At a stored quantile the reserved peak counts with its ratio, or once where that is less, in a process
    with room on the card as in one that needs more than the card has.
    """
    upper = upper_process_bytes(make_budget(card(), probability, RULES), reserved_mib * MIB)
    z = NormalDist().inv_cdf(probability)
    assert upper == int((400 + z * 40) * MIB + max(1.0, ratio) * reserved_mib * MIB)


def test_upper_bound_of_a_full_card() -> None:
    """A process that fits shows no more than the card has."""
    assert upper_process_bytes(make_budget(card(), 0.99, RULES), 9_600 * MIB) == 10_000 * MIB


def test_quantiles_rise() -> None:
    """The stored quantiles reach from 0 to 1 and rise in both columns."""
    probabilities, ratios = zip(*PEAK_RATIO_QUANTILES, strict=True)
    assert (probabilities[0], probabilities[-1]) == (0.0, 1.0)
    assert list(probabilities) == sorted(set(probabilities))
    assert list(ratios) == sorted(ratios)


@UNTIMED
@given(
    st.floats(0.5, 1, exclude_max=True),
    st.floats(0.5, 1, exclude_max=True),
    st.integers(0, 12_000),
    st.one_of(st.none(), st.integers(2, 12_000)),
)
def test_upper_bounds(one: float, other: float, reserved_mib: int, cap_mib: int | None) -> None:
    """The upper bound is at least context and reserved peak, rises with the confidence, and passes the card
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
