"""The search for the largest batch size against brute force on outcome functions of every shape."""

from collections.abc import Callable
from math import log2

import pytest
from hypothesis import example, given, strategies as st

from planner.planning.search.boundary import (
    MOST_ISLANDS,
    NEIGHBOURS,
    Search,
    boundary_along_lines,
    boundary_between,
    largest,
    largest_by_extrapolation,
    largest_near,
    round_down,
)
from planner.program import LARGEST_BATCH
from planner.program.events import Outcome

OUTCOMES = {"F": Outcome.FITS, "r": Outcome.FITS_WITH_RETRIES, ".": Outcome.DOES_NOT_FIT}
NEIGHBOUR_PROBES = 11  # 2 to 8 above the boundary, and four shares


def of(text: str) -> Callable[[int], Outcome]:
    """Outcomes of the batch sizes from 1 on, a letter each; beyond the text, nothing fits."""
    return lambda batch: OUTCOMES[text[batch - 1]] if batch <= len(text) else Outcome.DOES_NOT_FIT


def boundaries(fits: int, comfortable: int) -> Callable[[int], Outcome]:
    """Outcomes that only worsen with the batch size."""

    def outcome(batch: int) -> Outcome:
        if batch > fits:
            return Outcome.DOES_NOT_FIT
        return Outcome.FITS if batch <= comfortable else Outcome.FITS_WITH_RETRIES

    return outcome


def answer_of(search: Search) -> tuple[int, int, int | None]:
    return search.largest, search.comfortable, search.first_failure


@st.composite
def monotone(draw: st.DrawFn) -> tuple[int, int, int]:
    """A limit, the largest that fits up to it, and the largest that fits without retries."""
    limit = draw(st.one_of(st.integers(1, 40), st.integers(1, 10**4), st.just(LARGEST_BATCH)))
    fits = draw(st.one_of(st.integers(0, limit), st.just(limit)))
    return limit, fits, draw(st.one_of(st.integers(0, fits), st.just(fits)))


@given(monotone())
def test_monotone_outcomes(case: tuple[int, int, int]) -> None:
    """If outcomes only worsen with the batch size, all three numbers are exact."""
    limit, fits, comfortable = case
    search = largest(boundaries(fits, comfortable), limit)
    assert answer_of(search) == (fits, comfortable, fits + 1 if fits < limit else None)


@example((LARGEST_BATCH, 5_000, 3_125))
@example((LARGEST_BATCH, 8_388_613, 6_291_459))
@given(monotone())
def test_probes_of_monotone_outcomes(case: tuple[int, int, int]) -> None:
    """Each batch size is probed at most once, none beyond the limit, and as many as a gallop, a bisection and
    the neighbours take, and once more the latter two where some batch sizes need retries.
    """
    limit, fits, comfortable = case
    batches: list[int] = []
    outcome = boundaries(fits, comfortable)

    def probe(batch: int) -> Outcome:
        batches.append(batch)
        return outcome(batch)

    search = largest(probe, limit)
    assert [(batch, outcome(batch)) for batch in batches] == list(search.probes)
    assert len(set(batches)) == len(batches)
    assert all(1 <= batch <= limit for batch in batches)
    most = 2 * log2(fits + 1) + 2 + NEIGHBOUR_PROBES
    if comfortable < fits:
        most += log2(fits + 1) + NEIGHBOUR_PROBES
    assert len(batches) <= most


@given(st.text(alphabet="FFFrr.", max_size=40))
def test_any_outcomes(text: str) -> None:
    """Both answers fit as reported for any outcomes, their successors and neighbours do not, and the first
    failure is the smallest one probed.
    """
    limit = max(1, len(text))
    search = largest(of(text), limit)
    seen = dict(search.probes)
    assert seen == {batch: of(text)(batch) for batch in seen}
    assert search.comfortable <= search.largest <= limit
    assert search.largest == max((b for b, result in seen.items() if result != "no"), default=0)
    assert search.comfortable == max((b for b, result in seen.items() if result == "yes"), default=0)
    assert search.first_failure == min((b for b, result in seen.items() if result == "no"), default=None)
    for batch in range(search.largest + 1, min(search.largest + NEIGHBOURS, limit) + 1):
        assert seen[batch] is Outcome.DOES_NOT_FIT
    for batch in range(search.comfortable + 1, min(search.comfortable + NEIGHBOURS, search.largest) + 1):
        assert seen[batch] is not Outcome.FITS


@given(st.integers(0, 300), st.integers(2, NEIGHBOURS), st.integers(1, 50))
def test_islands_near_the_boundary(boundary: int, distance: int, width: int) -> None:
    """An island of fitting batch sizes that starts up to 8 above the boundary is found up to its end."""
    text = "F" * boundary + "." * (distance - 1) + "r" * width
    assert answer_of(largest(of(text))) == (boundary + distance - 1 + width, boundary, boundary + 1)


@pytest.mark.parametrize("percent", [2, 3, 5, 8])
def test_islands_in_proportion(percent: int) -> None:
    """Above a large boundary an island is found as well where it lies 2, 3, 5 or 8 % higher."""
    island = 1000 + 10 * percent
    search = largest(lambda batch: Outcome.FITS if batch <= 1000 or batch == island else Outcome.DOES_NOT_FIT)
    assert answer_of(search) == (island, island, 1001)


# Letters from AlexNet, VGG-11, VGG-16 and ViT-B/16 on small cards, and shapes that are easy to get wrong.
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", (0, 0, 1)),
        ("r", (1, 0, 2)),
        (".F", (2, 2, 1)),
        ("..r", (3, 0, 1)),
        (".......F", (8, 8, 1)),
        ("F.F", (3, 3, 4)),  # 2 is never probed
        ("F..r", (4, 1, 2)),
        ("FrFr.r", (6, 3, 5)),
        ("FFFFFFF.rr..r", (13, 7, 8)),
        ("FFFFFFFFFrrrr..r.r", (18, 9, 14)),
        ("FFFFFFF....rr", (13, 7, 8)),
        ("FFFFFFFFFFFFFFFF.F", (18, 18, 17)),
        ("rrrrrrrrr", (9, 0, 10)),
        ("rrrF", (4, 4, 5)),
        ("FrrrrFFrrr", (10, 7, 11)),
        ("FFrrrrrFrr", (10, 8, 11)),
    ],
)
def test_outcomes_by_hand(text: str, answer: tuple[int, int, int]) -> None:
    """The largest, the comfortable and the first failing batch size of outcomes that are written out."""
    assert answer_of(largest(of(text))) == answer


def test_probes_in_order() -> None:
    """Three gallops, a bisection and the neighbours are the probes of a boundary at 5."""
    yes, no = Outcome.FITS, Outcome.DOES_NOT_FIT
    assert largest(of("FFFFF")) == Search(
        largest=5,
        comfortable=5,
        first_failure=6,
        probes=(
            *((1, yes), (3, yes), (7, no)),
            *((5, yes), (6, no)),
            *((8, no), (9, no), (10, no), (11, no), (12, no), (13, no)),
        ),
    )


def test_all_fit() -> None:
    """A job that fits at the limit has no failure, and takes 25 probes."""
    search = largest(lambda batch: Outcome.FITS)
    assert answer_of(search) == (2**24, 2**24, None)
    assert len(search.probes) == 25


def test_no_islands_without_end() -> None:
    """Outcomes that alternate for ever end the search after some islands, with a batch size that fits."""
    search = largest(lambda batch: Outcome.DOES_NOT_FIT if batch % 2 else Outcome.FITS)
    assert answer_of(search) == (2 * MOST_ISLANDS, 2 * MOST_ISLANDS, 1)


@pytest.mark.parametrize(
    ("fixed", "per_sample", "room", "answer", "probes"),
    [
        (10, 7, 100, (12, 12, 13), [12, 13]),
        (10, 7, 10 + 7 * 300, (300, 300, 301), [300, 301]),  # beyond where the first line may be followed
        (100, 7, 50, (0, 0, 1), [1]),
        (-200, 60, 100, (5, 5, 6), [5, 6]),
        (50, 0, 100, (LARGEST_BATCH, LARGEST_BATCH, None), None),  # no line leads anywhere
    ],
)
def test_a_line_leads_to_the_boundary(
    fixed: int, per_sample: int, room: int, answer: tuple[int, int, int | None], probes: list[int] | None
) -> None:
    """If needs are a straight line, the answer and its successor are the only probes."""

    def need_bytes(batch: int) -> int:
        return fixed + per_sample * batch

    def outcome(batch: int) -> Outcome:
        return Outcome.FITS if need_bytes(batch) <= room else Outcome.DOES_NOT_FIT

    search = largest_by_extrapolation(outcome, (need_bytes, need_bytes), room, (2, 3))
    assert answer_of(search) == answer
    if probes is not None:
        assert [batch for batch, _ in search.probes] == probes


@given(st.integers(0, 60), st.integers(0, 60), st.lists(st.integers(0, 30), min_size=64, max_size=64))
def test_any_line_leads_to_a_boundary(fits: int, comfortable: int, noise: list[int]) -> None:
    """The answer is right for any needs where outcomes only worsen with the batch size."""
    comfortable = min(fits, comfortable)

    def need_bytes(batch: int) -> int:
        return 10 * batch + noise[batch % 64]

    search = largest_by_extrapolation(boundaries(fits, comfortable), (need_bytes, need_bytes), 300, (2, 3))
    assert answer_of(search) == (fits, comfortable, fits + 1)


def test_an_answer_without_retries_is_both() -> None:
    """Above some that take retries one fits without: it is the largest, and the largest without retries."""
    assert answer_of(largest_near(of("FFrrF.."), (2, 4))) == (5, 5, 6)
    rounded = round_down(largest_near(of("FFrrFF."), (2, 5)), 3, of("FFrrFF."))
    assert (rounded.largest, rounded.comfortable) == (6, 6)


@pytest.mark.parametrize("stride", [1, 5, 64])
def test_steps_grow_from_a_guess_that_fits(stride: int) -> None:
    """The first step is longer if the guess's successor fits too; the answer is the same."""
    for text in ("FF" + "r" * 200, "FF", "FFr", "FF" + "r" * 4):
        search = largest_near(of(text), (2, 2), 1000, stride)
        assert answer_of(search) == (len(text), 2, len(text) + 1)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 10**6))
def test_a_line_through_what_fits_leads_to_the_boundary(start: int, more: int, fixed_bytes: int) -> None:
    """The need of batch sizes that fit is asked alone, and two lines are enough if it is linear."""
    boundary, asked = start + more, []
    limit_bytes = fixed_bytes + 1000 * boundary + 999

    def fits(batch: int) -> bool:
        asked.append(batch)
        return fixed_bytes + 1000 * batch <= limit_bytes

    def need_bytes(batch: int) -> int:
        assert fixed_bytes + 1000 * batch <= limit_bytes
        return fixed_bytes + 1000 * batch

    assert boundary_along_lines(fits, need_bytes, limit_bytes, start, LARGEST_BATCH) == boundary
    assert len(set(asked)) <= 6


@given(st.integers(0, 5000), st.integers(1, 5000), st.data())
def test_a_boundary_between_probes_is_found_by_bisection(low: int, width: int, data: st.DataObject) -> None:
    """One below the end is probed first, then halves."""
    boundary = data.draw(st.integers(low, low + width - 1))
    asked = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= boundary

    assert boundary_between(fits, low, low + width) == boundary
    assert len(asked) <= 2 + log2(width)
    assert not asked or asked[0] == low + width - 1
