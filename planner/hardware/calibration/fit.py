"""Fit a line that predicts a run's measured peak from its replayed peak.

If the runs do not support the line, the line is refused with a reason. The line is `measured = overhead +
slope * replayed`, by Huber's loss around the line of Theil and Sen:

- Some batch sizes are far off, to one side: cuDNN takes a transient workspace at one batch and none at the
  next. Least squares would tilt the line. Huber's loss bounds the effect of one point, is convex, so that the
  answer does not depend on a start value, and loses 5 % against least squares on normal data. The line of
  Theil and Sen (a median of slopes) gives the scale that Huber's loss needs.
- Prior knowledge enters as two more residuals under the same loss. A replay counts the allocator's bytes, so
  the slope is held near 1, by `(slope - 1) / 0.01`: otherwise four points that scatter by 4 % would tilt the
  line by 10 %. The overhead is held near the size of lazily loaded code, plus the context that the runs
  showed if their peaks include it. With good points (10 MiB of scatter over 1 GiB) neither changes anything,
  and the bounded loss lets good points overrule both.
- A line is not supported by its points if it predicts left-out batch sizes worse than no line, by the median
  or by the mean error. Without a line the planner adds the context to the replay. So the line is compared
  with the replay alone if the runs give their rise over the context, and with the replay plus the median
  context of the same runs if their peaks include the context (which stays in use after a refusal). If no run
  has a context, there is nothing to compare with. A line with an error of at most 1 % is never refused, since
  below 1 % chance decides.
- The scale is the median of the absolute residuals without the two smallest, which a line can always make
  zero (Maronna, Martin and Yohai, Robust Statistics, section 4.4.2), times 1.4826: a deviation under
  normality.
- The stored spread combines this scale with the scale of published runs about their replays, as variances.
  The weights are the degrees of freedom of the residuals and two. So five points that happen to be on a line
  do not make the sixth certain, and outliers still to come are allowed for.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import theilslopes

from planner.hardware.calibration.model import Fit, NoFit, Point, fitted_peak_bytes, includes_context
from planner.hardware.device import MIB
from planner.hardware.likeness import kind_without_trace
from planner.hardware.residuals import load_residuals

FEWEST_BATCHES = 4
SMALLEST_RANGE = 1.1  # the largest replayed peak over the smallest
# Quartiles of measured over replayed peak of 60 published runs, 0.996 and 1.009, by 1.349
# (benchmarks/published/outcomes.py)
SLOPE_DEVIATION = 0.01
# Size of the lazily loaded code of kernels, cuDNN and cuBLAS: 20 to 120 MiB in the same runs.
LAZY_MIB, LAZY_DEVIATION_MIB = 70.0, 50.0
HUBER = 1.345  # 95 % efficiency under normality
NVML_STEP_MIB = 2.0  # published figures are multiples of it; no scale below makes sense
USUAL_FREEDOMS = 2  # weight of the usual scatter of runs
OUTLIER = 3.0  # scales
GOOD_ERROR = 0.01  # a line with at most this error is never refused
SLOPES = (0.5, 2.0)  # outside this range, the replay and the run are not of the same job

Floats = NDArray[np.float64]


class LeftOut(Struct, frozen=True):
    """The measured, replayed and predicted peak of a run whose batch size was left out of a fit."""

    batch: int
    measured_bytes: int
    calibrated_bytes: int
    replayed_bytes: int

    @property
    def error(self) -> float:
        """Return the relative error of the prediction, positive if it is too large."""
        return self.calibrated_bytes / self.measured_bytes - 1


def fit_points(points: Sequence[Point]) -> Fit | NoFit:
    """Return the robust line fitted to the unconstrained runs, or the reason to refuse it.

    Runs that failed, had retries or had a cap are left out, since limits clip their peaks. Raises ValueError
    if emulated and other runs are mixed.
    """
    if len({point.observation.source == "emulated" for point in points}) > 1:
        raise ValueError("emulated runs and others are not fitted together")
    whole = [point for point in points if point.observation.is_unconstrained]
    context = includes_context(whole)
    used = [point for point in whole if fitted_peak_bytes(point.observation, context) is not None]
    refusal = _refuse(points, whole, used)
    if refusal is not None:
        return refusal
    x, y = _columns(used, context)
    overhead, slope = _line(x, y, _expected_overhead(used, context))
    if not SLOPES[0] <= slope <= SLOPES[1]:
        return NoFit(f"the slope is {slope:.2f}: the replay and the runs are not of the same job")
    worse = _worse_than_none(used, context)
    if worse is not None:
        return worse
    residuals = y - overhead - slope * x
    scale = _scale(residuals)
    freedoms, usual = len(x) - 2, _usual_scale(used)
    spread = sqrt((freedoms * scale**2 + USUAL_FREEDOMS * usual**2) / (freedoms + USUAL_FREEDOMS))
    width = float(np.sqrt(((x - x.mean()) ** 2).sum()))
    leverages = 1 / len(x) + ((x - x.mean()) / width) ** 2
    far = np.abs(residuals) > OUTLIER * scale
    outliers = {point.observation.batch for point, off in zip(used, far, strict=True) if off}
    return Fit(
        overhead_bytes=round(overhead * MIB),
        slope=round(slope, 6),
        spread_bytes=round(spread * MIB),
        points=len(used),
        center_bytes=round(float(x.mean()) * MIB),
        width_bytes=round(width * MIB),
        highest_leverage=round(float(leverages.max()), 4),
        outliers=tuple(sorted(outliers)),
    )


def leave_one_batch_out(points: Sequence[Point]) -> list[LeftOut]:
    """Predict the peak of each unconstrained run by a line fitted to the runs at other batch sizes.

    At least four batch sizes are needed.
    """
    whole = [point for point in points if point.observation.is_unconstrained]
    context = includes_context(whole)
    left_out = []
    for batch in sorted({point.observation.batch for point in whole}):
        others = [point for point in whole if point.observation.batch != batch]
        overhead, slope = _line(*_columns(others, context), _expected_overhead(others, context))
        for point in whole:
            measured = fitted_peak_bytes(point.observation, context)
            if point.observation.batch == batch and measured is not None:
                calibrated = round(overhead * MIB + slope * point.replayed_bytes)
                left_out.append(LeftOut(batch, measured, calibrated, point.replayed_bytes))
    return left_out


def _refuse(points: Sequence[Point], whole: Sequence[Point], used: Sequence[Point]) -> NoFit | None:
    batches = {point.observation.batch for point in used}
    if len(batches) < FEWEST_BATCHES:
        problem = f"{len(batches)} batch sizes with a peak of their own, at least {FEWEST_BATCHES} are needed"
        clipped = len(points) - len(whole)
        hint = f"; {clipped} of {len(points)} runs ran out of memory or were held back: take smaller batches"
        return NoFit(problem + (hint if clipped else ""))
    peaks = [point.replayed_bytes for point in used]
    if min(peaks) <= 0 or max(peaks) < SMALLEST_RANGE * min(peaks):
        return NoFit(
            f"the batch sizes {min(batches)} to {max(batches)} hardly differ in memory, so no slope shows: "
            "take batches further apart"
        )
    return None


def _worse_than_none(used: Sequence[Point], context: bool) -> NoFit | None:
    """Return a refusal if the line predicts left-out runs worse than the replay does, else None.

    If the peaks include the context, the median context is added to the replay.
    """
    added = _median_context_bytes(used) if context else 0
    if added is None:
        return None
    lefts = leave_one_batch_out(used)
    with_line = [abs(left.error) for left in lefts]
    without = [abs((left.replayed_bytes + added) / left.measured_bytes - 1) for left in lefts]
    for average, words in ((median, ""), (fmean, " on average")):  # the mean shows the tail, which kills runs
        if average(with_line) > max(GOOD_ERROR, average(without)):
            return NoFit(
                f"left-out batches come out {100 * average(with_line):.1f} % off with the line{words} and "
                f"{100 * average(without):.1f} % without: the scatter is no line"
            )
    return None


def _median_context_bytes(points: Sequence[Point]) -> float | None:
    """Return the median size of the runs' contexts, or None if no run has a context."""
    contexts = [point.observation.context_after_bytes for point in points]
    sizes = [size_bytes for size_bytes in contexts if size_bytes is not None]
    return median(sizes) if sizes else None


def _expected_overhead(points: Sequence[Point], context: bool) -> float | None:
    """Return the line's expected overhead in MiB, or None if peaks include a context that no run measured."""
    if not context:
        return 0.0 if points[0].observation.source == "emulated" else LAZY_MIB  # no kernels are loaded there
    shown = _median_context_bytes(points)  # after the third step, with lazily loaded code
    return None if shown is None else shown / MIB


def _columns(points: Sequence[Point], context: bool) -> tuple[Floats, Floats]:
    """Return the replayed and the measured peaks in MiB, skipping points without a measured peak."""
    pairs = [(p.replayed_bytes, fitted_peak_bytes(p.observation, context)) for p in points]
    columns = np.array([(x, y) for x, y in pairs if y is not None], dtype=np.float64) / MIB
    return columns[:, 0], columns[:, 1]


def _line(x: Floats, y: Floats, expected: float | None) -> tuple[float, float]:
    """Fit the robust line to peaks in MiB, and return its overhead and slope.

    `expected` is the expected overhead in MiB, None if it is unknown.
    """
    center = float(x.mean())
    start = float(theilslopes(y, x)[0]) if np.ptp(x) else 1.0  # equal peaks show no slope
    level = float(np.median(y - start * (x - center)))
    scale = _scale(y - level - start * (x - center))

    def residuals(line: Floats) -> Floats:
        known = [(line[1] - 1) / SLOPE_DEVIATION]
        if expected is not None:
            known.append((line[0] - line[1] * center - expected) / LAZY_DEVIATION_MIB)
        return np.append((line[0] + line[1] * (x - center) - y) / scale, known)

    solution = least_squares(
        residuals, [level, start], loss="huber", f_scale=HUBER, x_scale=[scale, SLOPE_DEVIATION], xtol=1e-12
    )
    level, slope = map(float, solution.x)
    return level - slope * center, slope


def _usual_scale(points: Sequence[Point]) -> float:
    """Return the usual deviation of runs from their replays, in MiB at the points' mean replayed peak.

    It is the standard deviation of published runs of the same kind.
    """
    kind = kind_without_trace(points[0].observation.job)
    share = load_residuals().kinds[kind].verdicts.scale
    return share * float(np.mean([point.replayed_bytes for point in points])) / MIB


def _scale(residuals: Floats) -> float:
    """Return a robust standard deviation of a line's residuals in MiB, at least `NVML_STEP_MIB`."""
    telling = np.sort(np.abs(residuals))[2:]
    return max(NVML_STEP_MIB, 1.4826 * float(np.median(telling))) if len(telling) else NVML_STEP_MIB
