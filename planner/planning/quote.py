"""Price a GPU."""

from msgspec import Struct

from planner.hardware import Offer


class Quote(Struct, frozen=True):
    """The cheapest instance with a GPU, and the samples that one such GPU trains on in a second."""

    offer: Offer | None = None  # None where the file has no price of it
    throughput: float | None = None  # as the user measured it

    @property
    def price(self) -> float | None:
        """Return US dollars an hour, of the whole instance."""
        return None if self.offer is None else self.offer.price

    @property
    def per_million_samples(self) -> float | None:
        """Return US dollars for a million samples on one GPU of the instance, which is paid for whole."""
        if self.offer is None or self.throughput is None:
            return None
        return self.offer.price / (self.throughput * 3600) * 1_000_000
