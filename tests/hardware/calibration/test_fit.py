"""The line through measured peaks."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from planner.hardware.calibration.fit import fit_points, leave_one_batch_out
from planner.hardware.calibration.model import Fit, NoFit, Point
from planner.hardware.device import MIB
from planner.hardware.residuals import RunKind, load_residuals
from tests.helpers.calibrations import points
from tests.helpers.structs import replace

STEPS = (1_000.0, 2_000.0, 3_000.0, 4_000.0, 6_000.0, 8_000.0, 10_000.0, 12_000.0)


def of_unknown_context(runs: list[Point]) -> list[Point]:
    """Return the runs without their contexts."""
    return [replace(run, observation=replace(run.observation, context_after_bytes=None)) for run in runs]


def fitted(fit: Fit | NoFit) -> Fit:
    assert isinstance(fit, Fit), fit
    return fit


def reason(fit: Fit | NoFit) -> str:
    assert isinstance(fit, NoFit)
    return fit.reason


@given(st.floats(-200, 2_000), st.floats(0.9, 1.15), st.integers(4, 8))
# Statements about noise hold for nearly all of it: the sample is the same in every run.
def test_exact_line(overhead: float, slope: float, count: int) -> None:
    """Points on a line give the line to 10 MiB at its ends, none is an outlier, and the spread is two parts
    in `count` of what runs usually scatter by.
    """
    x = STEPS[:count]
    fit = fitted(fit_points(points(x, [overhead + slope * each for each in x])))
    for each in x:
        assert fit.peak_bytes(round(each * MIB)) / MIB == pytest.approx(overhead + slope * each, abs=10)
    usual = load_residuals().kinds[RunKind.CONVOLUTIONS].verdicts.scale * np.mean(x)
    assert fit.spread_bytes / MIB == pytest.approx(usual * (2 / count) ** 0.5, rel=0.1)
    assert (fit.points, fit.outliers) == (count, ())


@given(st.integers(0, 2**32 - 1), st.floats(100, 1_500), st.floats(0.95, 1.1), st.floats(300, 3_000))
@settings(max_examples=60)
def test_noise_and_outliers(seed: int, overhead: float, slope: float, lift: float) -> None:
    """With 5 MiB of noise and two runs of twelve lifted by a workspace, overhead and slope come back, the
    spread is that of the noise and of runs in general, and both lifted runs are named.
    """
    random = np.random.default_rng(seed)
    x = np.linspace(1_000, 12_000, 12)
    y = overhead + slope * x + random.normal(0, 5, 12)
    lifted = random.choice(12, 2, replace=False)
    y[lifted] += lift
    fit = fitted(fit_points(of_unknown_context(points(x.tolist(), y.tolist()))))
    assert fit.overhead_bytes / MIB == pytest.approx(overhead, abs=40)
    assert fit.slope == pytest.approx(slope, abs=0.005)
    usual = load_residuals().kinds[RunKind.CONVOLUTIONS].verdicts.scale * np.mean(x)
    noise = (fit.spread_bytes / MIB) ** 2 * 12 - 2 * usual**2
    assert 10 * 1**2 <= noise <= 10 * 25**2
    assert {10 * (int(index) + 1) for index in lifted} <= set(fit.outliers)


@given(st.permutations(range(8)), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_order_does_not_matter(order: list[int], seed: int) -> None:
    """Runs in any order give one fit."""
    noise = np.random.default_rng(seed).normal(0, 50, 8)
    runs = points(STEPS, [900 + x + e for x, e in zip(STEPS, noise, strict=True)])
    one, other = fitted(fit_points(runs)), fitted(fit_points([runs[index] for index in order]))
    assert one.slope == pytest.approx(other.slope, abs=1e-5)
    assert one.spread_bytes == pytest.approx(other.spread_bytes, abs=MIB / 10)
    assert one.outliers == other.outliers


def test_scatter_does_not_tilt() -> None:
    """Four runs that scatter by 4 % leave the slope near 1, where least squares would see 0.9."""
    x, y = (1_000, 1_500, 2_000, 2_500), (1_080, 1_580, 1_950, 2_400)
    assert np.polyfit(x, y, 1)[0] == pytest.approx(0.866, abs=0.01)
    assert 0.95 < fitted(fit_points(points(x, y))).slope < 1


def test_a_known_context_holds_the_overhead() -> None:
    """Four runs that scatter by half a per cent, with a context of 350 MiB: an overhead near it, and a wilder
    one where no run has the context.
    """
    x, y = (1_000, 1_500, 2_000, 2_500), (1_362, 1_842, 2_358, 2_838)
    known, unknown = (fitted(fit_points(runs)) for runs in (points(x, y), of_unknown_context(points(x, y))))
    assert abs(known.overhead_bytes / MIB - 350) < abs(unknown.overhead_bytes / MIB - 350) < 100


def rises(replayed: tuple[int, ...], measured: tuple[int, ...]) -> list[Point]:
    """Return runs that have their rise over the context and no context."""
    runs = points(replayed, measured)
    return [
        replace(
            run,
            observation=replace(
                run.observation,
                process_peak_bytes=None,
                context_before_bytes=None,
                context_after_bytes=None,
                process_rise_bytes=run.observation.process_peak_bytes,
            ),
        )
        for run in runs
    ]


def test_scatter_is_no_line() -> None:
    """A line that predicts left-out batches worse than the replay alone is refused, with both figures."""
    published = ((1_744, 2_548, 3_428, 4_252, 5_900), (2_118, 3_088, 3_506, 4_066, 5_654))
    assert fit_points(rises(*published)) == NoFit(
        "left-out batches come out 6.5 % off with the line and 4.6 % without: the scatter is no line"
    )


def test_scatter_beside_a_known_context() -> None:
    """If the peak holds the context, the other side is the replay with the context that the runs showed:
    the same scatter is refused on top of those 350 MiB; on top of 1,350 the line is the better of the two.
    """
    x, y = (1_744, 2_548, 3_428, 4_252, 5_900), (2_118, 3_088, 3_506, 4_066, 5_654)
    assert "the scatter is no line" in reason(fit_points(points(x, [350 + each for each in y])))
    fitted(fit_points(points(x, [1_350 + each for each in y])))


def test_no_context_to_compare_with() -> None:
    """Peaks without a known context have no other side to be compared with and keep their line."""
    x, y = (1_744, 2_548, 3_428, 4_252, 5_900), (2_118, 3_088, 3_506, 4_066, 5_654)
    fitted(fit_points(of_unknown_context(points(x, [350 + each for each in y]))))


def test_a_good_line_stands() -> None:
    """A line within 1 % is kept even where the replay alone is nearer by chance."""
    x, y = (1_000, 2_000, 3_000, 4_000), (1_004, 2_000, 2_996, 4_000)
    assert fitted(fit_points(rises(x, y))).points == 4


def test_leverage() -> None:
    """The fourth of four runs, three of them close together, has nearly all the weight of the slope."""
    fit = fitted(fit_points(points((1_000, 1_010, 1_020, 9_000), (1_500, 1_510, 1_520, 9_500))))
    assert fit.highest_leverage == pytest.approx(1.0, abs=0.001)
    assert fit.leverage(fit.center_bytes) == pytest.approx(0.25)


def test_bound_rises() -> None:
    """The bound is the line at even odds and rises with the confidence and away from the runs."""
    fit = fitted(fit_points(points(STEPS, [510 + x + (-1) ** int(x / 1_000) * 20 for x in STEPS])))
    middle, far = fit.center_bytes, 3 * fit.center_bytes
    assert fit.bound_bytes(middle, 0.5) == fit.peak_bytes(middle)
    margins = [fit.bound_bytes(at, p) - fit.peak_bytes(at) for at in (middle, far) for p in (0.9, 0.99)]
    assert 0 < margins[0] < margins[1] < margins[3]
    assert margins[0] < margins[2] < margins[3]


def test_bound_by_hand() -> None:
    """Ten points and two of the usual spread leave 10 degrees of freedom, whose 99 % quantile is 2.764; in
    the middle a tenth is added.
    """
    fit = Fit(0, 1.0, 100 * MIB, 10, 5_000 * MIB, 1_000 * MIB, 0.3, ())
    margin = fit.bound_bytes(5_000 * MIB, 0.99) / MIB - 5_000
    assert margin == pytest.approx(2.7638 * 100 * 1.1**0.5, abs=0.1)


def test_too_few_batches() -> None:
    """Four runs at three batch sizes are not enough, and the refusal names how many are."""
    runs = points(STEPS[:3], STEPS[:3])
    assert reason(fit_points([*runs, runs[0]])) == (
        "3 batch sizes with a peak of their own, at least 4 are needed"
    )
    assert reason(fit_points([])).startswith("0 batch sizes")


def test_clipped() -> None:
    """Runs that died, released cached memory or had a cap have no peak of their own and are counted apart."""
    runs = points(STEPS[:6], STEPS[:6])
    seen = [run.observation for run in runs]
    capped = replace(seen[5].settings, allocator_cap_bytes=MIB)
    hindered = (
        replace(seen[3], oom=True),
        replace(seen[4], retries=1),
        replace(seen[5], settings=capped),
    )
    clipped = [Point(one, 1) for one in hindered]
    assert reason(fit_points([*runs[:3], *clipped])) == (
        "3 batch sizes with a peak of their own, at least 4 are needed; 3 of 6 runs ran out of memory or "
        "were held back: take smaller batches"
    )


def test_no_range() -> None:
    """Batch sizes whose replays differ by less than a tenth show no slope."""
    assert "hardly differ" in reason(fit_points(points((1_000, 1_020, 1_040, 1_060), (1, 2, 3, 4))))


def test_equal_peaks_beside_one_that_differs() -> None:
    """Small batches may replay to one peak, since segments are large: without the batch that differs no slope
    shows, and the line is the overhead alone.
    """
    fit = fitted(fit_points(points((1_000, 1_000, 1_000, 1_300), (1_400, 1_402, 1_401, 1_700))))
    assert fit.peak_bytes(1_300 * MIB) / MIB == pytest.approx(1_700, abs=10)


def test_another_job() -> None:
    """Peaks that rise three times as fast as the replay are not of the same job."""
    assert "not of the same job" in reason(fit_points(points(STEPS, [3 * x for x in STEPS])))


def test_without_context() -> None:
    """If the process is not visible the rise over the level before is fitted."""
    runs = [
        Point(
            replace(
                run.observation, process_peak_bytes=None, process_rise_bytes=run.replayed_bytes + 60 * MIB
            ),
            run.replayed_bytes,
        )
        for run in points(STEPS, STEPS)
    ]
    assert fitted(fit_points(runs)).overhead_bytes / MIB == pytest.approx(60, abs=1)


def test_left_out() -> None:
    """Each batch size is predicted without itself: a lifted run does not help its own prediction."""
    y = [500 + x for x in STEPS]
    y[4] += 1_000
    lefts = leave_one_batch_out(points(STEPS, y))
    assert [left.batch for left in lefts] == [10, 20, 30, 40, 50, 60, 70, 80]
    assert lefts[4].calibrated_bytes / MIB == pytest.approx(6_500, abs=15)
    assert lefts[4].error == pytest.approx(6_500 / 7_500 - 1, abs=0.003)
    assert max(abs(left.error) for left in lefts if left.batch != 50) < 0.02
