"""Splits of the batch size that a hook sets into micro-batches."""

from msgspec import Struct

from planner.errors import UsageError


class Split(Struct, frozen=True):
    """Samples of one step of the optimizer on one device, in micro-batches."""

    batch: int
    steps: int  # micro-batches in each step of the optimizer

    @property
    def samples(self) -> int:
        """Return the effective batch size on one device."""
        return self.batch * self.steps


def check_multiple(multiple: object) -> None:
    """Raise UsageError for anything but a whole number from 1."""
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise UsageError(f"multiple_of: {multiple!r} is refused; use a whole number from 1")


def split(samples: int, most: int, multiple: int = 1, fewest: int = 1) -> Split:
    """Split an effective batch into micro-batches of at most `most` samples, `fewest` at the least.

    Of all splits with up to twice as many micro-batches as needed, it is the one with the most samples, never
    more than `samples`; among equals the one with the fewest micro-batches. So the product is exact wherever
    a divisor between half of `most` and `most` exists.
    """
    unit = multiple if min(samples, most) >= multiple else 1
    needed = max(fewest, -(-samples // most))
    batches = {steps: min(most, samples // steps) for steps in range(fewest, min(2 * needed, samples) + 1)}
    candidates = [Split(batch - batch % unit, steps) for steps, batch in batches.items() if batch >= unit]
    return max(candidates, key=lambda one: (one.samples, -one.steps))


def split_up(samples: int, most: int, multiple: int = 1, fewest: int = 1) -> Split:
    """Split as `split` where that is exact, else with as few samples more as the rounding takes."""
    exact = split(samples, most, multiple, fewest)
    if exact.samples == samples:
        return exact
    unit = multiple if most >= multiple else 1
    steps = max(fewest, -(-samples // (most - most % unit)))
    batch = -(-samples // steps)
    return Split(batch + -batch % unit, steps)
