"""Rows of the accuracy report for calibrated answers: xMem's jobs, each batch size by the line through the
others of its job (`benchmarks/fits/published_calibrations.py` describes the fit and the measured peak).
"""

from collections.abc import Iterator, Sequence

from benchmarks.accuracy.rows import Row, texts
from benchmarks.fits.published_calibrations import Sweep, is_cnn, name_of, read_sweeps
from planner.hardware.calibration.fit import fit_points, leave_one_batch_out
from planner.hardware.calibration.model import Fit, Point
from planner.hardware.device import MIB

CALIBRATED = "calibrated on other batches"
STEPS = 400  # of the confidence


def calibrated_rows() -> list[Row]:
    """Return the rows of all left-out batch sizes."""
    from planner.capture.models.registry import import_transformers

    import_transformers()
    return [row for sweep in read_sweeps() for row in _of_sweep(sweep)]


def _of_sweep(sweep: Sweep) -> Iterator[Row]:
    name, gpu = name_of(sweep.job), sweep.runs[0]["gpu"]
    family = "cnn" if is_cnn(sweep) else "transformer"
    for left in leave_one_batch_out(sweep.points):
        others = [point for point in sweep.points if point.observation.batch != left.batch]
        estimates = texts({"planner": left.calibrated_bytes / MIB, "uncalibrated": left.replayed_bytes / MIB})
        reached = _confidence_reached(others, left.replayed_bytes, left.measured_bytes)
        if reached is not None:
            estimates["bound_confidence"] = f"{reached:.4f}"
        case = f"{name} {left.batch} ({gpu[:8]})"
        truth = f"{left.measured_bytes / MIB:.2f}"
        yield Row(CALIBRATED, "D", name.split()[0], case, family, gpu, left.batch, truth, estimates)


def _confidence_reached(others: Sequence[Point], replayed_bytes: int, measured_bytes: int) -> float | None:
    """Return the least confidence whose bound by the others' fit holds the peak; None without a fit."""
    fit = fit_points(others)
    if not isinstance(fit, Fit):
        return None
    low, high = 1 / STEPS, 1 - 1e-6
    if fit.bound_bytes(replayed_bytes, high) < measured_bytes:
        return 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (
            (low, middle) if fit.bound_bytes(replayed_bytes, middle) >= measured_bytes else (middle, high)
        )
    return high
