"""The reports of `planner tables` and `planner calibrate`: runs, fitted lines and residuals."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from calibration.campaign import FoundLimit
from planner.hardware.calibration import Calibration, Fit, NoFit, Point, fitted_peak_bytes
from planner.jobs import job_to_json
from planner.report.describe import describe_job
from planner.report.document import Block, Column, Document, Entry, Paragraph, Table
from planner.report.units import SCHEMA, attributes, mib, mib_column, mib_text

_FIGURES = ("overhead_mib", "spread_mib", "slope", "points", "highest_leverage", "outliers")


@dataclass(frozen=True, slots=True)
class Folder:
    """The path of a folder, and its calibrations."""

    path: str
    calibrations: tuple[Calibration, ...]


def tables_document(folders: Sequence[Folder], today: date) -> Document:
    """Return the report of `planner tables`. `folders` is in the order of look-up."""
    sections: list[list[Block]] = []
    for folder in folders:
        if count := len(folder.calibrations):
            sections.append([Paragraph(f"{count} calibration{'s' if count > 1 else ''} in {folder.path}")])
        sections += [calibration_section(one, today) for one in folder.calibrations]
    searched = ", ".join(folder.path for folder in folders)
    none = [Paragraph(f"No calibration is stored. Looked into: {searched}")]
    return Document.of(*sections) if sections else Document.of(none)


def calibration_section(calibration: Calibration, today: date) -> list[Block]:
    """Return the section on a calibration: its job, origin, versions, fitted line and runs.

    If the line was refused, the section has the reason.
    """
    entries = (
        ("Job", describe_job(calibration.key.job)),
        ("From", _origin(calibration, today)),
        ("Versions", _versions(calibration)),
        ("Line", _line(calibration)),
    )
    seen = "emulated" if calibration.source == "emulated" else "measured"
    figures = map(mib_column, ("replayed", seen, "fitted", "residual"))
    columns = [Column("batch", is_number=True, min_width=12), *figures, Column("MiB")]
    runs = tuple(_run_row(_run_to_json(calibration, point)) for point in calibration.points)
    return [
        Paragraph(calibration.describe(), "strong"),
        Table((Column(min_width=10), Column()), entries),
        Table(columns, runs, indent=0),
    ]


def tables_to_json(folders: Sequence[Folder], today: date) -> dict[str, Any]:
    """Return the JSON object of `planner tables`."""
    return {
        "schema": SCHEMA,
        "folders": [folder.path for folder in folders],
        "calibrations": [
            {"folder": folder.path} | calibration_to_json(one, today)
            for folder in folders
            for one in folder.calibrations
        ],
    }


def calibration_to_json(calibration: Calibration, today: date) -> dict[str, Any]:
    """Return the JSON object of a calibration.

    Either `fit` or `refused` is null, and MiB are rounded to 0.001.
    """
    key, fit = calibration.key, calibration.fit
    return {
        "model": key.job.model.name,
        "job": job_to_json(key.job),
        "gpu": key.gpu,
        **attributes(calibration, "source", "about", "when"),
        "age_days": _age_days(calibration, today),
        **attributes(key, "versions"),
        "traced_with": calibration.traced_with,
        **attributes(key, "settings"),
        "includes_context": calibration.includes_context,
        "fit": None if isinstance(fit, NoFit) else attributes(fit, *_FIGURES),
        "refused": fit.reason if isinstance(fit, NoFit) else None,
        "runs": [_run_to_json(calibration, point) for point in calibration.points],
    }


def _age_days(calibration: Calibration, today: date) -> int | None:
    """Return a calibration's age in days, or None if `when` is not an ISO date. The age is at least 0."""
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
    if isinstance(fit, NoFit):
        return f"refused: {fit.reason}"
    context = "with" if calibration.includes_context else "without"
    off = f"off the line: batch {', '.join(map(str, fit.outliers))}" if fit.outliers else "no outliers"
    return (
        f"{mib_text(fit.overhead_bytes)} MiB + {fit.slope:.4f} x replayed peak reserved, {context} the "
        f"context; spread {mib_text(fit.spread_bytes)} MiB, {fit.points} points, highest leverage "
        f"{fit.highest_leverage:.2f}, {off}"
    )


def _run_to_json(calibration: Calibration, point: Point) -> dict[str, Any]:
    """Return the JSON object of a calibration's run.

    The measured or emulated size is the peak of the process or, if the overhead excludes the context, the
    rise of the process. `fitted_mib` is the peak by the fit, and `used` whether the run was used for the fit.
    """
    observation, fit = point.observation, calibration.fit
    seen = fitted_peak_bytes(observation, calibration.includes_context)
    seen_mib, emulated = None if seen is None else mib(seen), observation.source == "emulated"
    fitted = fit.peak_bytes(point.replayed_bytes) if isinstance(fit, Fit) else None
    residual = None
    if observation.is_unconstrained and seen is not None and fitted is not None:
        residual = mib(seen - fitted)
    return {
        "batch": observation.batch,
        "replayed_mib": mib(point.replayed_bytes),
        "measured_mib": None if emulated else seen_mib,
        "emulated_mib": seen_mib if emulated else None,
        "fitted_mib": None if fitted is None else mib(fitted),
        "residual_mib": residual,
        "oom": observation.oom,
        "used": residual is not None,
    }


def _run_row(run: dict[str, Any]) -> tuple[str, ...]:
    seen = "measured_mib" if run["emulated_mib"] is None else "emulated_mib"
    sizes = (run[name] for name in ("replayed_mib", seen, "fitted_mib"))
    residual = "-" if run["residual_mib"] is None else f"{run['residual_mib']:+,.1f}"
    bounded = "" if run["used"] or run["fitted_mib"] is None else "not fitted: it was bounded"
    remark = "out of memory" if run["oom"] else bounded
    return (f"{run['batch']}", *("-" if size is None else f"{size:,.1f}" for size in sizes), residual, remark)


# ---- runs that planner calibrate measured or imported


@dataclass(frozen=True, slots=True)
class Campaign:
    """The results of a call of `planner calibrate`: calibrations, limits, failures, number of runs."""

    folder: Path
    new: int  # number of new runs in this call
    left: int  # number of series for which the time did not suffice
    limits: Sequence[FoundLimit]
    calibrations: Sequence[Calibration]
    failures: Sequence[str]  # one text for each failed run
    set_aside: Sequence[str]  # one text for each line of imported files that was skipped
    today: date


def campaign_document(campaign: Campaign) -> Document:
    """Return the report of `planner calibrate`. It shows new runs, limits, failures and each calibration."""
    count = f"{campaign.new} new run{'' if campaign.new == 1 else 's'}"
    head: list[Block] = [Paragraph(f"{count}, saved in {campaign.folder}")]
    if campaign.left:
        head.append(Paragraph(f"Time is up with {campaign.left} series left: call again to go on"))
    head += [Paragraph(f"Largest batch {_limit_text(one)}") for one in campaign.limits]
    head += [Entry("Failed", text) for text in campaign.failures]
    head += [Entry("Set aside", text) for text in campaign.set_aside]
    return Document.of(head, *(calibration_section(one, campaign.today) for one in campaign.calibrations))


def _limit_text(one: FoundLimit) -> str:
    size = f"{'' if one.limit.is_exact else 'at least '}{one.limit.largest:,}"
    return (
        f"{size}: {one.job.model.name} with {one.job.loop.optimizer} under {mib_text(one.cap_bytes, 0)} MiB"
    )


def campaign_to_json(campaign: Campaign) -> dict[str, Any]:
    """Return the JSON object of `planner calibrate`."""
    return {
        "schema": SCHEMA,
        "folder": str(campaign.folder),
        "new_runs": campaign.new,
        "series_left": campaign.left,
        "limits": [
            {
                "model": one.job.model.name,
                "cap_mib": mib(one.cap_bytes),
                "max_batch": one.limit.largest,
                "exact": one.limit.is_exact,
            }
            for one in campaign.limits
        ],
        "calibrations": [calibration_to_json(one, campaign.today) for one in campaign.calibrations],
        **attributes(campaign, "failures", "set_aside"),
    }
