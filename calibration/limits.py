"""The true largest batch under a cap: gallop and bisect, each probe being real steps in a fresh process.

Probes cost seconds, so the search starts from a guess and asks for no neighbours of the boundary, unlike
`planner.planning.search`, whose probes are replays.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct

from planner.hardware.calibration import Observation

LARGEST_BATCH = 2**20
FIRST_STEP_SHARE = 50  # the gallop begins with this part of the guess


class Limit(Struct, frozen=True):
    """The known bounds of the largest batch."""

    largest: int  # the largest batch that lived; 0: none did
    first_oom: int | None  # the smallest that died; None: none did

    @property
    def is_exact(self) -> bool:
        """Return whether no batch lies between the two."""
        return self.first_oom is not None and self.first_oom - self.largest == 1


def find_limit(lives: Callable[[int], bool], guess: int) -> Limit:
    """Narrow the boundary down until it is exact, or `LARGEST_BATCH` lives."""
    limit = Limit(0, None)
    batch = min(max(guess, 1), LARGEST_BATCH)
    step = max(1, guess // FIRST_STEP_SHARE)
    while not limit.is_exact and limit.largest < LARGEST_BATCH:
        limit = Limit(batch, limit.first_oom) if lives(batch) else Limit(limit.largest, batch)
        if limit.first_oom is None:
            batch = min(limit.largest + step, LARGEST_BATCH)
        elif limit.largest == 0:
            batch = max(limit.first_oom - step, 1)
        else:
            batch = (limit.largest + limit.first_oom) // 2
        step *= 2
    return limit


def guess_limit(observations: Iterable[Observation], cap_bytes: int) -> int | None:
    """Return the batch at which a line through the allocated peaks of the runs that lived meets the cap.

    None without two batch sizes between which the peak grows. A guess only: the allocator rounds, and a run
    near the cap lives by giving back what it has cached.
    """
    peaks = {
        observation.batch: observation.peak_allocated_bytes
        for observation in observations
        if not observation.oom and observation.peak_allocated_bytes is not None
    }
    if len(peaks) < 2:
        return None
    first, last = min(peaks), max(peaks)
    slope = (peaks[last] - peaks[first]) / (last - first)
    if slope <= 0:
        return None
    return max(1, min(LARGEST_BATCH, int(last + (cap_bytes - peaks[last]) / slope)))
