"""The batch size that hooks set, and the split of an effective batch."""

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from planner.api.integrations.batch_choice import BatchSplit, check_multiple, split, split_up
from planner.errors import UsageError


@pytest.mark.parametrize(
    ("samples", "most", "multiple", "expected"),
    [
        (32, 2272, 1, BatchSplit(32, 1)),  # all in one
        (32, 20, 1, BatchSplit(16, 2)),
        (96, 40, 1, BatchSplit(32, 3)),
        (90, 16, 8, BatchSplit(8, 11)),  # 88: no split into multiples of 8 has more
        (1009, 100, 1, BatchSplit(84, 12)),  # a prime number: 1,008, one sample less
        (4096, 30, 1, BatchSplit(16, 256)),  # many micro-batches
        (17, 16, 16, BatchSplit(16, 1)),
        (5, 100, 8, BatchSplit(5, 1)),  # smaller than the multiple
    ],
)
def test_split(samples: int, most: int, multiple: int, expected: BatchSplit) -> None:
    """The product is the effective batch where a divisor fits well, else the nearest below it."""
    assert split(samples, most, multiple) == expected


@pytest.mark.parametrize("divide", [split, split_up])
def test_several_micro_batches_may_be_smaller_than_the_multiple(divide: Callable[..., BatchSplit]) -> None:
    """Eight samples in two micro-batches at least have no micro-batch of five."""
    assert divide(8, 7, 5, 2) == BatchSplit(4, 2)


@given(st.integers(2, 5000), st.integers(1, 600), st.sampled_from([1, 4, 8]))
def test_split_never_exceeds_the_request(samples: int, most: int, multiple: int) -> None:
    """A split has no more samples than requested, fits, and a good divisor makes it exact."""
    groups = split(samples, most, multiple)
    assert 1 <= groups.batch <= most
    assert groups.samples <= samples
    needed = -(-samples // most)
    good = [d for d in range(1, most + 1) if samples % d == 0 and samples // d <= 2 * needed]
    if multiple == 1:
        assert (groups.samples == samples) == bool(good)


@given(st.integers(2, 5000), st.integers(1, 600), st.sampled_from([1, 4, 8]))
def test_split_up_is_at_least_the_request(samples: int, most: int, multiple: int) -> None:
    """An effective batch that may grow grows by less than the rounding of its micro-batches."""
    groups = split_up(samples, most, multiple)
    assert 1 <= groups.batch <= most
    assert 0 <= groups.samples - samples < groups.steps * multiple or groups.samples == samples


@pytest.mark.parametrize("multiple", [0, -8, 1.5, True, "8"])
def test_multiple_is_a_whole_number(multiple: object) -> None:
    """Anything but a whole number from 1 is refused."""
    with pytest.raises(UsageError, match="multiple_of"):
        check_multiple(multiple)
