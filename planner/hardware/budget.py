"""Compute the GPU memory that is left for the caching allocator.

A confidence from 0.5 to below 1 sets the margins. A run needs r times the memory that its replay needs at
least. r is normal; residuals.py fits it to the outcomes of published runs of the job's kind, and likeness.py
widens it. A batch fits if, with the confidence,

    context + r * need <= usable memory.

Context and usable memory have their own deviations; all are taken as normal and independent. The spread of r
is fitted to verdicts, not to peaks: if memory is short, cuDNN falls back to plans with smaller workspaces, so
a run that peaks high on an empty GPU still fits a small GPU. No margin is negative.

If a calibration applies, a batch fits if its replay does not fail within

    (usable memory - overhead - z * spread) / slope,

in which `overhead` includes the context. A cap on the allocator keeps the margin of verdicts: it bounds only
the reserved memory, which does not include the overhead, and peaks on an empty GPU hardly show which batches
fit a full GPU.

The memory limit at a confidence c is the memory that is available with probability c;
there may be more. But the caching allocator is not monotone in its memory: a batch that releases cached
memory in order to fit may fail with a little more memory. For c above 0.5 such a batch must also fit under
OTHER_LIMITS further limits, at confidences from c down to 1 - c in equal steps, 0.5 among them. With eight
limits, no range that has an eighth of the probability is missed; each limit costs a replay at most. A batch
that fits without retries does the same under any larger limit, and is not replayed again.
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
OTHER_LIMITS = 8  # an even number, so that the likeliest limit is among them


class Budget(Struct, frozen=True):
    """The memory limits that a GPU leaves to the allocator at a confidence, with the figures behind them."""

    device: Device
    confidence: float
    cap_bytes: int | None  # a bound on the allocator alone, as `set_per_process_memory_fraction` sets
    limits: MemoryLimits  # of the replay, so that the answer holds with the confidence
    correction: Correction | None = None  # by the calibration that applies; None if no calibration applies
    likeness: Likeness = Likeness()  # to published runs, whose residuals give margins and probabilities
    larger_limits: tuple[MemoryLimits, ...] = ()  # under which a batch that fits with retries must fit too

    @property
    def all_limits(self) -> tuple[MemoryLimits, ...]:
        """Return the memory limits under which a batch must fit, the smallest first."""
        return (self.limits, *self.larger_limits)

    @property
    def likely_limits(self) -> MemoryLimits:
        """Return the memory limits at a confidence of 0.5, which have no margin."""
        limits = limits_at(self, EVEN_ODDS)
        assert limits is not None
        return limits

    @property
    def bound_bytes(self) -> int | None:
        """Return the bound on reserved memory: the cap, else the configuration's fraction, else None."""
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
    """Return the allocator's budget: the GPU's memory minus the context, the driver's memory and margins.

    If `correction` has a context, it replaces the GPU's context. A cap bounds the allocator alone, so only
    the uncertainty of the replay counts against it. Raises UsageError for a confidence outside of 0.5 to 1, a
    cap below 2 MiB, and a configuration with a fraction of unlimited memory.
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
    """Return eight confidences in equal steps from below `confidence` down to 1 - `confidence`.

    Returns () for a confidence of 0.5.
    """
    step = (2 * confidence - 1) / OTHER_LIMITS
    return tuple(confidence - number * step for number in range(1, OTHER_LIMITS + 1)) if step else ()


def limits_at(budget: Budget, confidence: float) -> MemoryLimits | None:
    """Return the memory limits of a replay at a confidence between 0 and 1, or None if nothing limits it.

    None is possible only at a confidence below 0.5.
    """
    z = NormalDist().inv_cdf(confidence)
    device, cap_bytes, verdicts = budget.device, budget.cap_bytes, margins_of(budget.likeness).verdicts
    scale = 1 + verdicts.location + z * verdicts.scale
    if z >= 0:
        scale = max(1.0, scale)
    elif scale <= 0:
        return None
    capacity = total = None
    if device.usable.value < UNLIMITED_BYTES:
        left, deviation, slope = memory_for_replay(device, budget.correction)
        need = _max_need(left, deviation, verdicts, z) if slope is None else (left - z * deviation) / slope
        capacity = max(0, int(need))
        # A fraction in the configuration refers to the total, and bounds only the allocator, as a cap does.
        total = int(device.usable.value / scale)
    limit_bytes = None if cap_bytes is None else int(cap_bytes / scale)
    return MemoryLimits(capacity, limit_bytes, total, budget.limits.config)


def check_confidence(confidence: float) -> float:
    """Check that a confidence is from 0.5 to below 1, and return it. Raises UsageError if it is not."""
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence {confidence}: give a probability from 0.5 to below 1, such as 0.99")
    return confidence


def judge_budget(budget: Budget, job: Job, trace: Trace) -> Budget:
    """Return the budget with margins from the published runs that a job resembles. Raises DataFileError."""
    likeness = likeness_of(job, trace, budget.device.capability)
    if platform := PLATFORMS.get(budget.device.vendor):
        likeness = replace(likeness, unlike=(platform, *likeness.unlike))
    return with_likeness(budget, likeness)


def with_likeness(budget: Budget, likeness: Likeness) -> Budget:
    """Return the budget with memory limits recomputed for the margins of another `Likeness`."""
    if likeness == budget.likeness:
        return budget
    return make_budget(
        budget.device, budget.confidence, budget.limits.config, budget.cap_bytes, budget.correction, likeness
    )


def _max_need(left: float, deviation: float, verdicts: Spread, z: float) -> float:
    """Return the largest need of a replay, in bytes, that fits `left` bytes with margins.

    It is the largest n with (1 + location) n + z hypot(deviation, scale n) <= left. If z is at least 0, the
    result is at most `left`. If z is negative, 1 + location + z scale must be positive. If |z| scale is at
    least 1 + location, the two deviations are added instead of `hypot`.
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


def memory_for_replay(device: Device, correction: Correction | None) -> tuple[float, float, float | None]:
    """Return the bytes left for a replay, their deviation, and a calibration's slope or None without a line.

    With a line, a replay may need the bytes left divided by the slope.
    """
    overhead, deviation, slope = _process_overhead(device, correction)
    return device.usable.value - overhead, hypot(deviation, device.usable.spread), slope


def _process_overhead(device: Device, correction: Correction | None) -> tuple[float, float, float | None]:
    """Return the bytes of a process outside its replay, their deviation, and a calibration's slope or None.

    Without a calibration's line, the bytes are the context and NCCL's memory, and the slope is None. With a
    line, its overhead is added, and replaces the context if the overhead includes the context.
    """
    size, spread = device.outside
    if correction is None or correction.fit is None:
        return size, spread, None
    if correction.includes_context:
        size, spread = nccl_memory(device)
    fit = correction.fit
    deviation = hypot(fit.spread_bytes, spread, correction.extra_spread_bytes)
    return fit.overhead_bytes + size, deviation, fit.slope


def nccl_memory(device: Device) -> tuple[int, float]:
    """Return the bytes that NCCL takes outside the allocator and the CUDA context, and their deviation.

    Both are 0 if the device has no figure for NCCL.
    """
    return (0, 0.0) if device.nccl is None else (device.nccl.value, device.nccl.spread)


def is_fitted(budget: Budget) -> bool:
    """Return whether the budget is corrected by a line fitted to runs of the job."""
    return budget.correction is not None and budget.correction.fit is not None


def process_bytes(budget: Budget, peak_reserved_bytes: int) -> int:
    """Return the expected memory of a process in nvidia-smi, in bytes.

    `peak_reserved_bytes` is the reserved peak of the process's replay.
    """
    overhead, _, slope = _process_overhead(budget.device, budget.correction)
    return round(overhead + (slope or 1) * peak_reserved_bytes)


def upper_process_bytes(budget: Budget, peak_reserved_bytes: int) -> int:
    """Return the upper bound of a process's memory in nvidia-smi, in bytes, at the budget's confidence.

    The bound of a process that is expected to fit is at most the GPU's usable memory, since the allocator
    releases cached segments and cuDNN takes smaller workspaces if memory is short.
    """
    (outside, deviation), usable_bytes = budget.device.outside, budget.device.usable.value
    z = NormalDist().inv_cdf(budget.confidence)
    expected = process_bytes(budget, peak_reserved_bytes)
    correction = budget.correction
    if correction is not None and correction.fit is not None:  # its prediction bound and other spreads
        fit = correction.fit
        margin = fit.bound_bytes(peak_reserved_bytes, budget.confidence) - fit.peak_bytes(peak_reserved_bytes)
        spread = nccl_memory(budget.device)[1] if correction.includes_context else deviation
        upper = expected + round(hypot(margin, z * round(hypot(correction.extra_spread_bytes, spread))))
    else:
        reserved = margins_of(budget.likeness).peak_ratio(budget.confidence) * peak_reserved_bytes
        if budget.bound_bytes is not None:
            reserved = max(peak_reserved_bytes, min(reserved, budget.bound_bytes))
        upper = int(outside + z * deviation + reserved)
    return min(upper, usable_bytes) if expected <= usable_bytes else upper
