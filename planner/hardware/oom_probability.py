"""Estimate the probability that a batch runs out of memory.

The estimate uses the margins of runs that the job resembles.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import hypot
from statistics import NormalDist

from planner.allocator import MemoryLimits, Replay, replay_trace
from planner.hardware.budget import Budget, is_fitted, memory_for_replay
from planner.hardware.device import UNLIMITED_BYTES
from planner.hardware.likeness import margins_of
from planner.hardware.residuals import Spread
from planner.program import Outcome, Trace, live_bytes_bound

MAX_REPLAYS = 6
CERTAIN = 0.0005  # a probability this near to 0 or 1 is not refined
TOLERANCE = 0.1  # as a share of the smaller of a probability and its complement


def estimate_oom_probability(
    budget: Budget, trace: Trace, run: Replay, limit_replays: Iterable[tuple[MemoryLimits, Replay]] = ()
) -> float | None:
    """Return the probability that a replayed batch runs out of memory on the GPU, or None if unknown.

    Returns None if nothing bounds the memory, or if no run resembles the job and no calibration has a line
    for it. `run` is a replay that did not fail, under limits of the budget's configuration. The smallest
    memory in which the batch fits is between the bytes of its tensors and its reserved peak; replays in
    between narrow it down as far as needed. `limit_replays` holds further replays with their limits. If a
    replay above the smallest memory fails, all limits up to the next limit that fits on either side are
    assumed to fail, so that the probability is not underestimated.
    """
    if budget.cap_bytes is None and budget.device.usable.value >= UNLIMITED_BYTES:
        return None
    if budget.likeness.unlike and not is_fitted(budget):
        return None
    low = float(live_bytes_bound(trace.events)(run.batch))
    known = {max(low, float(run.peak_reserved_bytes)): True}
    for limits, other in limit_replays:
        if limits.allocator_limit_bytes is not None:
            known[float(limits.allocator_limit_bytes)] = other.outcome is not Outcome.DOES_NOT_FIT
    high = min(size for size, fits in known.items() if fits)
    low = max([low, *(size for size in known if size < high)])
    beyond = _probability_of_failures(
        budget, sorted((size, fits) for size, fits in known.items() if size >= high)
    )
    for _ in range(MAX_REPLAYS):
        least, most = (beyond + oom_probability_at(budget, need) for need in (low, high))
        if most < CERTAIN or least > 1 - CERTAIN or most - least <= TOLERANCE * min(most, 1 - least):
            break
        middle = (low + high) / 2
        limits = MemoryLimits(int(middle), config=budget.limits.config, total_bytes=budget.limits.total_bytes)
        fails = replay_trace(trace, limits).outcome is Outcome.DOES_NOT_FIT
        low, high = (middle, high) if fails else (low, middle)
    return min(1.0, beyond + oom_probability_at(budget, high))


def _probability_of_failures(budget: Budget, known: Sequence[tuple[float, bool]]) -> float:
    """Return the probability that the memory limit is in a range in which the batch is assumed to fail.

    `known` holds memory limits in bytes, in ascending order, each with whether the batch fits. The batch is
    assumed to fail between two neighbouring limits if it fails at one of them.
    """
    stretches = ((low, high) for (low, a), (high, b) in pairwise(known) if not (a and b))
    return sum(oom_probability_at(budget, high) - oom_probability_at(budget, low) for low, high in stretches)


def oom_probability_at(budget: Budget, need_bytes: float) -> float:
    """Return the probability that a run is out of memory if its replay fits in `need_bytes` but not in less.

    The result is the larger of the probabilities of exceeding the GPU and the cap, as one error causes both.
    """
    verdicts = margins_of(budget.likeness).verdicts
    probabilities = [0.0]
    if budget.bound_bytes is not None:
        probabilities.append(probability_beyond(budget.bound_bytes, need_bytes, verdicts, 0.0))
    device = budget.device
    if device.usable.value < UNLIMITED_BYTES:
        available, deviation, slope = memory_for_replay(device, budget.correction)
        spread = verdicts if slope is None else Spread(0, slope - 1, 0.0)
        probabilities.append(probability_beyond(available, need_bytes, spread, deviation))
    return max(probabilities)


def probability_beyond(available: float, need: float, verdicts: Spread, deviation: float) -> float:
    """Return the probability that a run takes more than `available` if its replay needs `need`.

    `deviation` is the standard deviation of `available`; all are in the same unit.

    >>> probability_beyond(100, 100, Spread(9, 0.0, 0.01), 0.0)
    0.5
    """
    spread = hypot(deviation, verdicts.scale * need)
    return 1 - NormalDist(0, max(spread, 1e-9)).cdf(available - (1 + verdicts.location) * need)
