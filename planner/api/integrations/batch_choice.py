"""Split the samples of an optimizer step into micro-batches."""

from msgspec import Struct

from planner.errors import UsageError


class BatchSplit(Struct, frozen=True):
    """The micro-batches of one optimizer step on one device."""

    batch: int  # samples per micro-batch
    steps: int  # micro-batches per optimizer step

    @property
    def samples(self) -> int:
        """Return the number of samples in one optimizer step on one device."""
        return self.batch * self.steps


def check_multiple(multiple: object) -> None:
    """Raise UsageError if `multiple` is not a whole number of at least 1."""
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise UsageError(f"multiple_of: {multiple!r} is refused; use a whole number from 1")


def split(samples: int, most: int, multiple: int = 1, fewest: int = 1) -> BatchSplit:
    """Split `samples`, all if possible, into `fewest` or more micro-batches of at most `most` samples each.

    The batch size is a multiple of `multiple` if possible. Among splits with up to twice as many
    micro-batches as needed, the split with the most samples is chosen, but never more than `samples`, and
    among equals the split with the fewest micro-batches. So the product is exact if `multiple` is 1 and
    `samples` has a divisor between half of `most` and `most`.
    """
    unit = multiple if min(samples // fewest, most) >= multiple else 1
    needed = max(fewest, -(-samples // most))
    batches = {steps: min(most, samples // steps) for steps in range(fewest, min(2 * needed, samples) + 1)}
    candidates = [
        BatchSplit(batch - batch % unit, steps) for steps, batch in batches.items() if batch >= unit
    ]
    return max(candidates, key=lambda one: (one.samples, -one.steps))


def split_up(samples: int, most: int, multiple: int = 1, fewest: int = 1) -> BatchSplit:
    """Split `samples` as `split` does or, if that leaves samples out, with the batch size rounded up."""
    exact = split(samples, most, multiple, fewest)
    if exact.samples == samples:
        return exact
    unit = multiple if most >= multiple else 1
    steps = max(fewest, -(-samples // (most - most % unit)))
    batch = -(-samples // steps)
    return BatchSplit(batch + -batch % unit, steps)
