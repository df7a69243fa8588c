"""Budget: the part of a GPU's memory that is left for the caching allocator, at a confidence.

A run needs r times the memory that its replay needs at the least, r being normal (residuals.py: fitted to
outcomes of published runs of the job's kind; likeness.py widens it). A batch fits if, with the confidence,

    context + r * need <= usable memory,

context and usable memory having their own deviations; all of them are taken as normal and independent. The
spread of r is that of verdicts, not of peaks: where memory is short, cuDNN falls back to plans with smaller
workspaces, so that a run which peaks high on an empty card still fits a small one. No margin is negative.

Where a calibration answers, a batch fits if its replay does not fail within

    (usable memory - overhead - z * spread) / slope,

`overhead` with the context in it. A cap on the allocator keeps the margin of verdicts: it bounds the reserved
memory alone, of which the overhead is no part, and peaks on an empty card hardly show what fits a full one.

The room at a confidence is the least that there is with it, and there may be more. But the caching allocator
is not monotone in its memory: a batch that releases cached memory in order to fit may fail where there is a
little more. At a confidence c above 0.5 such a batch must fit in OTHER_ROOMS further rooms as well, those at
confidences from c down to 1 - c in equal steps, 0.5 among them. They are eight, so that no stretch of rooms
that has an eighth of the probability goes unseen; each costs a replay at most. A batch that fits without
retries does the same in any larger room, and is not replayed again.
"""

from math import hypot, sqrt
from statistics import NormalDist

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import AllocatorConfig, MemoryLimits
from planner.errors import UsageError
from planner.hardware.calibration.lookup import Correction
from planner.hardware.device import MIB, UNLIMITED_BYTES, Device
from planner.hardware.likeness import Likeness, likeness_of, margins_of
from planner.hardware.residuals import Spread
from planner.hardware.vendors import PLATFORMS
from planner.jobs import Job
from planner.program import Trace

EVEN_ODDS = 0.5  # the confidence without a margin
OTHER_ROOMS = 8  # an even number: the likeliest room is one of them


class Budget(Struct, frozen=True):
    """The allocator's share of a GPU."""

    device: Device
    confidence: float
    cap_bytes: int | None  # a bound on the allocator alone, as `set_per_process_memory_fraction` sets
    limits: MemoryLimits  # what the replay may take, so that the answer holds with the confidence
    correction: Correction | None = None  # the calibration that answers; None: none does
    likeness: Likeness = Likeness()  # to the published runs whose residuals its margins and probabilities are
    larger_limits: tuple[
        MemoryLimits, ...
    ] = ()  # of rooms as probable, in which a batch with retries must fit

    @property
    def rooms(self) -> tuple[MemoryLimits, ...]:
        """Return the limits of each room in which a batch must fit, from the smallest to the largest."""
        return (self.limits, *self.larger_limits)

    @property
    def likely_limits(self) -> MemoryLimits:
        """Return what the replay may take on the GPU as it is expected to be, without a margin."""
        limits = limits_at(self, EVEN_ODDS)
        assert limits is not None
        return limits

    @property
    def bound_bytes(self) -> int | None:
        """Return the bound on the allocator alone: the cap, else the fraction in its configuration."""
        fraction_bytes = self.limits.config.memory_limit_bytes(self.device.usable.value)
        return fraction_bytes if self.cap_bytes is None else self.cap_bytes


def make_budget(
    device: Device,
    confidence: float,
    config: AllocatorConfig,
    cap_bytes: int | None = None,
    correction: Correction | None = None,
    likeness: Likeness = Likeness(),  # noqa: B008
) -> Budget:
    """Return a budget with room for the context, the driver and the uncertainty of each.

    A correction with a context puts it in place of the GPU's. A cap bounds the allocator alone, so that only
    the uncertainty of the replay counts against it. Raises UsageError for a confidence outside of 0.5 to 1,
    a cap below 2 MiB, and a configuration with a fraction of unlimited memory.
    """
    check_confidence(confidence)
    if cap_bytes is not None and cap_bytes < 2 * MIB:
        raise UsageError("--allocator-cap-mib: the allocator takes 2 MiB at the least; give a larger cap")
    if config.per_process_memory_fraction < 1 and device.usable.value >= UNLIMITED_BYTES:
        raise UsageError(
            "--alloc-conf: per_process_memory_fraction is of a GPU's memory; give --gpu NAME or --gpu-mib N"
        )
    if correction is not None and correction.context is not None:
        device = replace(device, context=correction.context)
    budget = Budget(device, confidence, cap_bytes, MemoryLimits(config=config), correction, likeness)
    limits, *others = (limits_at(budget, each) for each in (confidence, *_lower_confidences(confidence)))
    assert limits is not None
    larger = dict.fromkeys(other for other in others if other is not None and other != limits)
    return replace(budget, limits=limits, larger_limits=tuple(larger))


def with_config(budget: Budget, config: AllocatorConfig) -> Budget:
    """Return the budget with another configuration of the allocator."""
    larger = tuple(replace(limits, config=config) for limits in budget.larger_limits)
    return replace(budget, limits=replace(budget.limits, config=config), larger_limits=larger)


def _lower_confidences(confidence: float) -> tuple[float, ...]:
    """Return the confidences of the further rooms, from high to low; none at even odds."""
    step = (2 * confidence - 1) / OTHER_ROOMS
    return tuple(confidence - number * step for number in range(1, OTHER_ROOMS + 1)) if step else ()


def limits_at(budget: Budget, confidence: float) -> MemoryLimits | None:
    """Return what a replay may take at any confidence; None below even odds: no memory is too little."""
    z = NormalDist().inv_cdf(confidence)
    device, cap_bytes, verdicts = budget.device, budget.cap_bytes, margins_of(budget.likeness).verdicts
    scale = 1 + verdicts.location + z * verdicts.scale
    if z >= 0:
        scale = max(1.0, scale)
    elif scale <= 0:
        return None
    capacity = total = None
    if device.usable.value < UNLIMITED_BYTES:
        left, deviation, slope = room_beside_process(device, budget.correction)
        need = _max_need(left, deviation, verdicts, z) if slope is None else (left - z * deviation) / slope
        capacity = max(0, int(need))
        # A fraction in the configuration refers to the total, and bounds the allocator alone as a cap does.
        total = int(device.usable.value / scale)
    limit_bytes = None if cap_bytes is None else int(cap_bytes / scale)
    return MemoryLimits(capacity, limit_bytes, total, budget.limits.config)


def check_confidence(confidence: float) -> float:
    """Return the probability. Raises UsageError for one outside of 0.5 to 1."""
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence {confidence}: give a probability from 0.5 to below 1, such as 0.99")
    return confidence


def judge_budget(budget: Budget, job: Job, trace: Trace) -> Budget:
    """Return the budget with the margins of the published runs that the job is like. Raises DataFileError."""
    likeness = likeness_of(job, trace, budget.device.capability)
    if platform := PLATFORMS.get(budget.device.vendor):
        likeness = replace(likeness, unlike=(platform, *likeness.unlike))
    return with_likeness(budget, likeness)


def with_likeness(budget: Budget, likeness: Likeness) -> Budget:
    """Return the budget with the margins of published runs that a job is like so far."""
    if likeness == budget.likeness:
        return budget
    return make_budget(
        budget.device, budget.confidence, budget.limits.config, budget.cap_bytes, budget.correction, likeness
    )


def _max_need(left: float, deviation: float, verdicts: Spread, z: float) -> float:
    """Return the largest n with (1 + location) n + z hypot(deviation, scale n) <= left; at most `left` from
    even odds on. Below them, 1 + location + z scale is positive.
    """
    mean = 1 + verdicts.location
    if left <= z * deviation:
        return 0.0
    leading = mean**2 - (z * verdicts.scale) ** 2
    rest = left**2 - (z * deviation) ** 2
    if leading <= 0:  # at confidences that no sample supports: the margins are added instead
        return (left - z * deviation) / (mean + z * verdicts.scale)
    root = sqrt(max(0.0, (mean * left) ** 2 - leading * rest))
    return min(left, rest / (mean * left + root)) if z >= 0 else (mean * left + root) / leading


def room_beside_process(device: Device, correction: Correction | None) -> tuple[float, float, float | None]:
    """Return the GPU's memory for the replay, its deviation, and a fit's slope if any."""
    overhead, deviation, slope = _process_overhead(device, correction)
    return device.usable.value - overhead, hypot(deviation, device.usable.spread), slope


def _process_overhead(device: Device, correction: Correction | None) -> tuple[float, float, float | None]:
    """Return the process's memory besides the replay, its deviation, and the slope where there is a fit."""
    size, spread = device.outside
    if correction is None or correction.fit is None:
        return size, spread, None
    if correction.includes_context:
        size, spread = beside_context(device)
    fit = correction.fit
    deviation = hypot(fit.spread_bytes, spread, correction.extra_spread_bytes)
    return fit.overhead_bytes + size, deviation, fit.slope


def beside_context(device: Device) -> tuple[int, float]:
    """Return what lies outside torch's allocator and the CUDA context, and its deviation: NCCL's memory."""
    return (0, 0.0) if device.nccl is None else (device.nccl.value, device.nccl.spread)


def is_fitted(budget: Budget) -> bool:
    """Return whether a line through measured runs of the job answers in place of published runs."""
    return budget.correction is not None and budget.correction.fit is not None


def process_bytes(budget: Budget, peak_reserved_bytes: int) -> int:
    """Return the memory that nvidia-smi shows for the process at its peak."""
    overhead, _, slope = _process_overhead(budget.device, budget.correction)
    return round(overhead + (slope or 1) * peak_reserved_bytes)


def upper_process_bytes(budget: Budget, peak_reserved_bytes: int) -> int:
    """Return the most that nvidia-smi shows for the process, context included, at the confidence.

    A process that fits takes no more than its GPU has: where the allocator meets that end it releases cached
    segments, and cuDNN takes smaller workspaces. One that needs more than the GPU has is not bounded by it.
    """
    (outside, deviation), usable_bytes = budget.device.outside, budget.device.usable.value
    z = NormalDist().inv_cdf(budget.confidence)
    expected = process_bytes(budget, peak_reserved_bytes)
    correction = budget.correction
    if correction is not None and correction.fit is not None:  # its prediction bound, and what is beside it
        fit = correction.fit
        margin = fit.bound_bytes(peak_reserved_bytes, budget.confidence) - fit.peak_bytes(peak_reserved_bytes)
        spread = beside_context(budget.device)[1] if correction.includes_context else deviation
        upper = expected + round(hypot(margin, z * round(hypot(correction.extra_spread_bytes, spread))))
    else:
        reserved = margins_of(budget.likeness).peak_ratio(budget.confidence) * peak_reserved_bytes
        if budget.bound_bytes is not None:
            reserved = max(peak_reserved_bytes, min(reserved, budget.bound_bytes))
        upper = int(outside + z * deviation + reserved)
    return min(upper, usable_bytes) if expected <= usable_bytes else upper
