"""The batch size that a hook sets: the largest without retries, and its split into micro-batches."""

from dataclasses import dataclass

from planner.errors import UsageError


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch size to train with."""

    batch: int
    warning: str = ""  # one line for the user; "" where there is nothing to warn of


@dataclass(frozen=True, slots=True)
class Split:
    """Samples of one step of the optimizer on one device, in micro-batches."""

    batch: int
    steps: int  # micro-batches in each step of the optimizer

    @property
    def samples(self) -> int:
        """Return the effective batch size on one device."""
        return self.batch * self.steps


def choose_batch(largest: int, at_ease: int, multiple: int) -> Choice:
    """Return the largest batch that trains without retries, rounded down to a multiple.

    Where each batch that fits takes retries, it is the largest that fits, with a warning. A batch below
    `multiple` is left as it is. Raises UsageError where not even one sample fits.
    """
    if largest == 0:
        raise UsageError("not even a batch of 1 fits; planner.advise says what would change that")
    if at_ease:
        return Choice(round_down(at_ease, multiple))
    batch = round_down(largest, multiple)
    return Choice(batch, f"batch {batch} fits only by releasing cached memory in each step, which takes time")


def check_multiple(multiple: object) -> None:
    """Raise UsageError for anything but a whole number from 1."""
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise UsageError(f"multiple_of: {multiple!r} is refused; use a whole number from 1")


def round_down(batch: int, multiple: int) -> int:
    """Return the batch size as a multiple; one that is smaller than that stays."""
    return batch - batch % multiple if batch >= multiple else batch


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
