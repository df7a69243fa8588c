"""The batch sizes that a job takes: all of them, or multiples of a number from a least one on."""

from msgspec import Struct


class BatchSizes(Struct, frozen=True):
    """Multiples of `unit` from `least` on."""

    least: int = 1
    unit: int = 1

    def floor(self, batch: int) -> int:
        """Return the largest of them up to a batch size; below the least, that."""
        return max(self.least, batch - batch % self.unit)


ANY_BATCH_SIZE = BatchSizes()
