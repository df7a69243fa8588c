"""Compute curves of memory against batch size for several GPUs.

Pages and plots that show any batch use the curves. Each point is the estimate of one batch on one GPU. GPUs
share the replays that no GPU's limits affect.
"""

from collections.abc import Sequence

from msgspec import Struct

from planner.hardware import Budget, process_bytes, upper_process_bytes
from planner.planning.estimate import unlimited
from planner.planning.search.replays import ReplayCache, TargetReplays
from planner.program import LARGEST_BATCH, Outcome, ProgramSet

BEYOND = 1.35  # end of a GPU's curve, as a multiple of its largest batch size
ENDLESS_BEYOND = 4  # end of the curve of an unlimited GPU, as a multiple of the requested batch


class SampleDensity(Struct, frozen=True):
    """The points per doubling of the batch size at a curve's upper end, and the number of doublings there."""

    per_doubling: int  # a power of two
    doublings: int  # below the top that have this density; smaller sizes, close in a plot, are powers of two


SELECTED_DENSITY = SampleDensity(8, 4)
OTHER_DENSITY = SampleDensity(4, 2)  # of the curves that were not requested; there are many of them


class CurvePoint(Struct, frozen=True):
    """The outcome and the memory peaks of a batch size on a GPU.

    If the batch is not expected to fit, the peaks are of an unlimited GPU.
    """

    batch: int
    outcome: Outcome
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    process_upper_bytes: int  # the same at the confidence


class DeviceCurve(Struct, frozen=True):
    """The points of one GPU's curve in ascending order of batch size, and the GPU's largest batch size."""

    budget: Budget
    max_batch: int | None  # 0 if no batch size fits; None on an unlimited GPU
    points: tuple[CurvePoint, ...]


class BatchCurve(Struct, frozen=True):
    """The curves of memory against batch size of one job on several GPUs."""

    batch: int  # requested; each GPU has a point for it
    curves: tuple[DeviceCurve, ...]
    chosen: int  # index of the requested GPU in `curves`


def take_curve(
    gpus: Sequence[tuple[Budget, int | None]], programs: ProgramSet, batch: int, chosen: int = 0
) -> BatchCurve:
    """Compute the curves of memory on `gpus`, pairs of a GPU's budget and its largest batch size.

    The largest batch size is None on an unlimited GPU. `chosen` is the index of the requested GPU, whose
    curve has more points. Raises the errors of a capture.
    """
    devices_by_size: dict[int, list[int]] = {}
    for number, (_, most) in enumerate(gpus):
        for size in curve_sizes(most, batch, SELECTED_DENSITY if number == chosen else OTHER_DENSITY):
            devices_by_size.setdefault(size, []).append(number)
    cache, targets = ReplayCache(programs), {budget.device.target for budget, _ in gpus}
    replays = {one: TargetReplays(cache, one, programs.bound(one), LARGEST_BATCH) for one in targets}
    points: list[list[CurvePoint]] = [[] for _ in gpus]
    for size in sorted(devices_by_size):
        for number in devices_by_size[size]:
            budget = gpus[number][0]
            points[number] += _points(replays[budget.device.target], size, budget)
    drawn = (DeviceCurve(budget, most, tuple(own)) for (budget, most), own in zip(gpus, points, strict=True))
    return BatchCurve(batch, tuple(drawn), chosen)


def curve_sizes(max_batch: int | None, batch: int, grid: SampleDensity) -> list[int]:
    """Return the batch sizes at which a GPU's curve has points, in ascending order.

    They include the largest and the requested batch size. The curve goes somewhat beyond both.
    """
    if max_batch is None:
        return sorted({batch, *_spaced_sizes(ENDLESS_BEYOND * batch, grid)})
    top = max(round(BEYOND * max_batch), round(1.1 * batch), 4)
    return sorted({batch, max(1, max_batch), *_spaced_sizes(top, grid)})


def _spaced_sizes(top: int, grid: SampleDensity) -> set[int]:
    """Return batch sizes from 1 to `top` or just above, at the density `grid`, at most `LARGEST_BATCH`."""
    sizes, size, end = {1}, 1, min(top, LARGEST_BATCH)
    while size < end:
        size += max(1, 2 ** (size.bit_length() - 1) // grid.per_doubling)
        sizes.add(size)
    fine = top >> grid.doublings
    return {size for size in sizes if size <= LARGEST_BATCH and (size >= fine or size & (size - 1) == 0)}


def _points(replays: TargetReplays, batch: int, budget: Budget) -> list[CurvePoint]:
    """Return the point of a GPU's curve at a batch size in a list, or [] if the size cannot be captured."""
    replays.outcome(batch, budget.limits)
    if replays.is_refused(batch):
        return []
    outcome, limits = replays.expected(batch, budget)
    is_undisturbed = replays.undisturbed_peak(batch, limits) is not None
    run = replays.run(batch, unlimited(limits) if is_undisturbed else limits)  # one for all GPUs
    reserved = run.peak_reserved_bytes
    peaks = run.peak_allocated_bytes, reserved
    process = process_bytes(budget, reserved), upper_process_bytes(budget, reserved)
    return [CurvePoint(batch, outcome, *peaks, *process)]
