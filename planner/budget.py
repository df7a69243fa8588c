"""What a card leaves to the caching allocator, at the confidence that the user asks for.

A batch fits if its replay does not fail within

    (usable memory - context - z * their spread) / (1 + z * spread of the replay),    z the normal quantile.

The spread of the replay is that of its verdicts, not of its peaks: where memory is short, cuDNN falls back
to plans with smaller workspaces, so that a run which peaks high on an empty card still fits a small one.

Where a calibration answers, a batch fits if its replay does not fail within

    (usable memory - overhead - z * spread) / slope,

`overhead` with the context in it. A cap on the allocator keeps the margin of verdicts: it bounds the reserved
memory alone, of which the overhead is no part, and peaks on an empty card say little of what fits a full one.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import hypot
from statistics import NormalDist

from planner.allocator_rules import AllocatorRules
from planner.calibrated import Correction, Fit
from planner.device import ENDLESS_BYTES, MIB, Device
from planner.errors import UsageError
from planner.replay import Arena

# benchmarks/published_outcomes.py on 180 published outcomes under allocator caps (xMem's artifact: torch 2.6,
# fp32, CNNs): 177 verdicts are right; the highest cap that died lies 0.01 % above the smallest one that our
# replay fits, the lowest that lived 2.0 % below it. The caps themselves are rounded to 1 % of the card.
VERDICT_SPREAD = 0.01

# The same script on the 60 process peaks of those runs: quantiles of measured over replayed peak. Transient
# cuDNN workspaces, which are not modelled yet, make the upper tail.
PEAK_RATIO_QUANTILES = (
    (0.0, 0.947),
    (0.05, 0.963),
    (0.25, 0.999),
    (0.5, 1.005),
    (0.75, 1.013),
    (0.9, 1.146),
    (0.95, 1.222),
    (0.99, 1.230),
    (1.0, 1.233),
)


@dataclass(frozen=True, slots=True)
class Budget:
    """The allocator's share of a card."""

    device: Device
    confidence: float
    cap_bytes: int | None  # a bound on the allocator alone, as `set_per_process_memory_fraction` sets
    arena: Arena  # what the replay may take, so that the answer holds with the confidence
    correction: Correction | None = None  # the calibration that answers; None: none does


def make_budget(
    device: Device,
    confidence: float,
    rules: AllocatorRules,
    cap_bytes: int | None = None,
    correction: Correction | None = None,
) -> Budget:
    """Leave room for the context, the driver and the uncertainty of each; `confidence` lies between 0.5 and
    1. A correction that tells the context puts it in place of the card's.

    A cap bounds the allocator alone, so that only the uncertainty of the replay counts against it. Raises
    UsageError for a confidence or a cap that makes no sense.
    """
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence {confidence}: give a probability from 0.5 to below 1, such as 0.99")
    if cap_bytes is not None and cap_bytes < 2 * MIB:
        raise UsageError("--allocator-cap-mib: the allocator takes 2 MiB at the least; give a larger cap")
    z = NormalDist().inv_cdf(confidence)
    scale = 1 + z * VERDICT_SPREAD
    if correction is not None and correction.context is not None:
        device = replace(device, context=correction.context)
    capacity = None
    if device.usable.value < ENDLESS_BYTES:
        overhead, deviation, slope = _outside(device, correction)
        spread = hypot(deviation, device.usable.spread)
        capacity = max(0, int((device.usable.value - overhead - z * spread) / (slope or scale)))
    limit = None if cap_bytes is None else int(cap_bytes / scale)
    # A fraction in the rules refers to the total, and bounds the allocator alone as a cap does.
    total = int(device.usable.value / scale) if device.usable.value < ENDLESS_BYTES else None
    return Budget(device, confidence, cap_bytes, Arena(capacity, limit, total, rules), correction)


def _outside(device: Device, correction: Correction | None) -> tuple[float, float, float | None]:
    """What the process takes besides the replay, its deviation, and the slope where a fit tells one."""
    fit = None if correction is None else correction.fit
    if correction is None or fit is None:
        return device.context.value, device.context.spread, None
    if correction.includes_context:
        return fit.overhead_bytes, hypot(fit.spread_bytes, correction.drift_bytes), fit.slope
    overhead = fit.overhead_bytes + device.context.value
    return overhead, hypot(fit.spread_bytes, device.context.spread, correction.drift_bytes), fit.slope


def process_bytes(budget: Budget, peak_reserved_bytes: int) -> int:
    """What nvidia-smi shows for the process at its peak."""
    overhead, _, slope = _outside(budget.device, budget.correction)
    return round(overhead + (slope or 1) * peak_reserved_bytes)


def upper_process_bytes(budget: Budget, peak_reserved_bytes: int) -> int:
    """Context and reserved memory, which nvidia-smi shows for the process, at most, at the confidence.

    A process that fits takes no more than its card has: where the allocator meets that end it releases cached
    segments, and cuDNN takes smaller workspaces. One that needs more than the card has is not bounded by it.
    """
    device, confidence = budget.device, budget.confidence
    correction = budget.correction
    if correction is not None and correction.fit is not None:
        return _calibrated_upper_bytes(budget, correction, correction.fit, peak_reserved_bytes)
    z = NormalDist().inv_cdf(confidence)
    probabilities = [probability for probability, _ in PEAK_RATIO_QUANTILES]
    above = bisect_left(probabilities, confidence)
    (p0, low), (p1, high) = PEAK_RATIO_QUANTILES[above - 1], PEAK_RATIO_QUANTILES[above]
    ratio = max(1.0, low + (high - low) * (confidence - p0) / (p1 - p0))
    context = device.context.value + z * device.context.spread
    reserved = ratio * peak_reserved_bytes
    if budget.cap_bytes is not None:
        reserved = max(peak_reserved_bytes, min(reserved, budget.cap_bytes))
    upper = int(context + reserved)
    fits = device.context.value + peak_reserved_bytes <= device.usable.value
    return min(upper, device.usable.value) if fits else upper


def _calibrated_upper_bytes(
    budget: Budget, correction: Correction, fit: Fit, peak_reserved_bytes: int
) -> int:
    """The prediction bound of the fit, with what is uncertain besides the fit, at most the card."""
    device = budget.device
    expected = process_bytes(budget, peak_reserved_bytes)
    margin = fit.bound_bytes(peak_reserved_bytes, budget.confidence) - fit.peak_bytes(peak_reserved_bytes)
    beside = correction.drift_bytes
    if not correction.includes_context:
        beside = round(hypot(beside, device.context.spread))
    upper = expected + round(hypot(margin, NormalDist().inv_cdf(budget.confidence) * beside))
    return min(upper, device.usable.value) if expected <= device.usable.value else upper
