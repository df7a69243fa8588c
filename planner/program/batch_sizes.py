"""The batch sizes that a job accepts: multiples of a number, starting at a smallest batch size."""

from msgspec import Struct


class BatchSizes(Struct, frozen=True):
    """The accepted batch sizes of a job: the multiples of `unit` that are at least `least`."""

    least: int = 1
    unit: int = 1

    def floor(self, batch: int) -> int:
        """Return the largest accepted batch size that is at most `batch`, or `least` if there is none."""
        return max(self.least, batch - batch % self.unit)


ANY_BATCH_SIZE = BatchSizes()
