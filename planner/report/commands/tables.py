"""Stored calibrations as text and as plain data for `json.dumps`: the runs, the line, its residuals."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from planner.hardware.calibration import (
    Calibration,
    Fit,
    Point,
    Refusal,
    is_whole,
    label,
    measured_bytes,
)
from planner.jobs import job_to_json
from planner.report.commands.as_json import SCHEMA
from planner.report.layout import DIGITS, job_text, wrapped
from planner.report.units import mib


@dataclass(frozen=True, slots=True)
class Shelf:
    """The calibrations of one folder."""

    folder: str
    calibrations: tuple[Calibration, ...]


def tables_text(shelves: Sequence[Shelf], today: date) -> str:
    """The report of `planner tables`; the folders in the order in which look-ups go through them."""
    if not any(shelf.calibrations for shelf in shelves):
        folders = ", ".join(shelf.folder for shelf in shelves)
        return "\n".join(wrapped("", f"No calibration is stored. Looked into: {folders}"))
    blocks = [
        block
        for shelf in shelves
        if shelf.calibrations
        for block in (_heading(shelf), *(calibration_text(one, today) for one in shelf.calibrations))
    ]
    return "\n\n".join(blocks)


def tables_to_json(shelves: Sequence[Shelf], today: date) -> dict[str, Any]:
    """The JSON object of `planner tables`."""
    return {
        "schema": SCHEMA,
        "folders": [shelf.folder for shelf in shelves],
        "calibrations": [
            {"folder": shelf.folder} | calibration_to_json(one, today)
            for shelf in shelves
            for one in shelf.calibrations
        ],
    }


def calibration_to_json(calibration: Calibration, today: date) -> dict[str, Any]:
    """One calibration. `fit` or `refused` is null; MiB are rounded to 0.001."""
    key, fit = calibration.key, calibration.fit
    return {
        "model": key.job.model,
        "job": job_to_json(key.job),
        "gpu": key.gpu,
        "source": calibration.source,
        "about": calibration.about,
        "when": calibration.when,
        "age_days": _age_days(calibration, today),
        "versions": asdict(key.versions) | {"capability": list(key.versions.capability)},
        "traced_with": calibration.traced_with,
        "settings": asdict(key.settings),
        "includes_context": calibration.includes_context,
        "fit": None if isinstance(fit, Refusal) else _fit_to_json(fit),
        "refused": fit.reason if isinstance(fit, Refusal) else None,
        "runs": [_run_to_json(calibration, point) for point in calibration.points],
    }


def calibration_text(calibration: Calibration, today: date) -> str:
    """One calibration: where it comes from, its line or why there is none, and each run."""
    lines = [
        *wrapped("", label(calibration)),
        *_entry("Job", job_text(calibration.key.job)),
        *_entry("From", _origin(calibration, today)),
        *_entry("Versions", _versions(calibration)),
        *_entry("Line", _line(calibration)),
    ]
    seen = "emulated" if calibration.source == "emulated" else "measured"
    columns = ("batch", "replayed", seen, "line says", "residual")
    lines.append("".join(f"{name:>12}" for name in columns) + "   MiB")
    return "\n".join([*lines, *(_row(_run_to_json(calibration, point)) for point in calibration.points)])


def _heading(shelf: Shelf) -> str:
    count = len(shelf.calibrations)
    return "\n".join(wrapped("", f"{count} calibration{'s' if count > 1 else ''} in {shelf.folder}"))


def _entry(name: str, text: str) -> list[str]:
    return wrapped(f"  {name:<10}", text)


def _age_days(calibration: Calibration, today: date) -> int | None:
    """None where the file's day is no date."""
    try:
        return max(0, (today - date.fromisoformat(calibration.when)).days)
    except ValueError:
        return None


def _origin(calibration: Calibration, today: date) -> str:
    days = _age_days(calibration, today)
    age = "" if days is None else f", {days:,} day{'' if days == 1 else 's'} ago"
    about = f"; {calibration.about}" if calibration.about else ""
    return f"{calibration.source} on {calibration.when}{age}{about}"


def _versions(calibration: Calibration) -> str:
    versions = calibration.key.versions
    named = (("CUDA", versions.cuda), ("cuDNN", versions.cudnn), ("driver", versions.driver))
    others = ", ".join(f"{name} {version or 'not recorded'}" for name, version in named)
    major, minor = versions.capability
    capability = f"compute capability {major}.{minor}"
    return f"torch {versions.torch}, {others}, {capability}; traced with torch {calibration.traced_with}"


def _line(calibration: Calibration) -> str:
    fit = calibration.fit
    if isinstance(fit, Refusal):
        return f"refused: {fit.reason}"
    context = "with" if calibration.includes_context else "without"
    off = f"off the line: batch {', '.join(map(str, fit.outliers))}" if fit.outliers else "no outliers"
    return (
        f"{mib(fit.overhead_bytes, DIGITS):,} MiB + {fit.slope:.4f} x replayed peak reserved, {context} the "
        f"context; spread {mib(fit.spread_bytes, DIGITS):,} MiB, {fit.points} points, highest leverage "
        f"{fit.highest_leverage:.2f}, {off}"
    )


def _fit_to_json(fit: Fit) -> dict[str, Any]:
    return {
        "overhead_mib": mib(fit.overhead_bytes),
        "slope": fit.slope,
        "spread_mib": mib(fit.spread_bytes),
        "points": fit.points,
        "highest_leverage": fit.highest_leverage,
        "outliers": list(fit.outliers),
    }


def _run_to_json(calibration: Calibration, point: Point) -> dict[str, Any]:
    """Measured, or emulated, is the process's peak or, where the overhead holds no context, its rise;
    fitted is what the line says of it, used whether the line was drawn through it.
    """
    measured = measured_bytes(point.observation, calibration.includes_context)
    emulated = point.observation.source == "emulated"
    fit = calibration.fit
    fitted = fit.peak_bytes(point.replayed_bytes) if isinstance(fit, Fit) else None
    residual = None
    if is_whole(point.observation) and measured is not None and fitted is not None:
        residual = mib(measured - fitted)
    return {
        "batch": point.observation.batch,
        "replayed_mib": mib(point.replayed_bytes),
        "measured_mib": None if emulated or measured is None else mib(measured),
        "emulated_mib": mib(measured) if emulated and measured is not None else None,
        "fitted_mib": None if fitted is None else mib(fitted),
        "residual_mib": residual,
        "oom": point.observation.oom,
        "used": residual is not None,
    }


def _row(run: dict[str, Any]) -> str:
    return f"{run['batch']:>12}{''.join(_cells(run))}{_remark(run)}".rstrip()


def _cells(run: dict[str, Any]) -> Iterator[str]:
    seen = "measured_mib" if run["emulated_mib"] is None else "emulated_mib"
    for name in ("replayed_mib", seen, "fitted_mib"):
        yield f"{'-':>12}" if run[name] is None else f"{run[name]:>12,.1f}"
    yield f"{'-':>12}" if run["residual_mib"] is None else f"{run['residual_mib']:>+12,.1f}"


def _remark(run: dict[str, Any]) -> str:
    if run["oom"]:
        return "   out of memory"
    return "" if run["used"] or run["fitted_mib"] is None else "   not fitted: it was bounded"
