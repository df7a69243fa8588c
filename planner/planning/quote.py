"""Compute the price of training on a rented GPU."""

from msgspec import Struct

from planner.hardware import Offer


class Quote(Struct, frozen=True):
    """The cheapest cloud instance with a GPU, and the training throughput of one GPU."""

    offer: Offer | None = None  # None if the price file has no instance with the GPU
    throughput: float | None = None  # samples per second of training, as the user measured it

    @property
    def price(self) -> float | None:
        """Return the price of the whole instance in US dollars per hour, or None if it is unknown."""
        return None if self.offer is None else self.offer.price

    @property
    def per_million_samples(self) -> float | None:
        """Return the cost in US dollars of training on a million samples, or None if unknown.

        The whole instance is paid for while one of its GPUs trains.
        """
        if self.offer is None or self.throughput is None:
            return None
        return self.offer.price / (self.throughput * 3600) * 1_000_000
