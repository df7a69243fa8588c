"""The report of `planner estimate` by the trace, as document and JSON."""

from typing import Any

from planner.allocator import Replay
from planner.hardware import Likeness, margins_of
from planner.hardware.calibration import Correction
from planner.planning import (
    Answer,
    Estimate,
    JobPhasePeak,
    RankFigures,
    Seconds,
    StepLimit,
)
from planner.planning.estimators import Method
from planner.program import GrowingSite, Growth
from planner.report.assumptions import assumptions
from planner.report.budget import budget_table, job_to_report
from planner.report.commands.estimates.tables import closing_section, memory_sections
from planner.report.commands.estimates.verdict import exit_entries, headline
from planner.report.describe import job_entry
from planner.report.document import (
    Document,
)
from planner.report.units import (
    attributes,
    breakdown,
    mib,
    mib_parts,
    to_builtins,
    with_mib,
)


def estimate_document(estimate: Estimate, import_seconds: float) -> Document:
    """Return the report of `planner estimate` if the method is the trace."""
    return Document.of(
        [headline(estimate, *exit_entries(estimate), job_entry(estimate.job))],
        [budget_table(estimate.budget)],
        *memory_sections(estimate),
        closing_section(estimate, estimate.seconds, import_seconds),
    )


def estimate_to_json(estimate: Estimate, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner estimate` if the method is the trace.

    `failure` describes the request that fails at the confidence, or is null if no request fails. If the batch
    is not expected to fit, the peaks are for a GPU with unlimited memory. MiB are rounded to 0.001, and the
    breakdown adds up to `process_mib`.
    """
    run, failed = estimate.run, estimate.failed
    return {
        **job_to_report(estimate.job, estimate.budget),
        "batch": run.batch,
        "method": Method.TRACE.value,
        **attributes(run, "peak_allocated_mib", "peak_reserved_mib", "end_allocated_mib"),
        **_steps(run),
        "phases": [_phase(peak) for peak in estimate.phases],
        **attributes(estimate, "process_mib", "process_upper_mib"),
        "pinned_host_mib": mib(estimate.host.pinned_bytes),
        "host": with_mib(estimate.host),
        "fits": estimate.outcome.value,
        "answer": None if estimate.answer is None else estimate.answer.value,
        "fits_until_step": None if estimate.step_limit is None else estimate.step_limit.steps,
        "p_out_of_memory": None if estimate.p_out_of_memory is None else round(estimate.p_out_of_memory, 5),
        "risk": _risk(estimate.budget.likeness),
        "retries": (failed or run).retries if estimate.answer is Answer.DOES_NOT_FIT else run.retries,
        "ranks": [_rank(row) for row in estimate.ranks],
        "retry_costs": to_builtins(estimate.retry_costs),
        "retry_costs_at_confidence": to_builtins(estimate.retry_costs_at_confidence),
        "failure": with_mib(failed and failed.failure),
        "breakdown_mib": mib_parts(breakdown(estimate)),
        "calibration": _calibration(estimate.budget.correction),
        "growth": _growth(estimate.growth, estimate.step_limit),
        "assumptions": list(assumptions(estimate)),
        **attributes(estimate, "unknown_ops"),
        "seconds": plan_seconds_to_json(estimate.seconds, import_seconds),
    }


def plan_seconds_to_json(seconds: Seconds, import_seconds: float) -> dict[str, float]:
    """Return the JSON value of `seconds`: the times of importing, tracing and replaying."""
    spent = {"import": import_seconds, "trace": seconds.trace, "replay": seconds.replay}
    return {name: round(value, 3) for name, value in spent.items()}


def _rank(row: RankFigures) -> dict[str, Any]:
    """Return the JSON value of a group of ranks with equal memory."""
    figures = attributes(row, "peak_allocated_mib", "peak_reserved_mib", "process_mib")
    return {"ranks": list(row.ranks), "fits": row.outcome.value, **figures}


def _risk(likeness: Likeness) -> dict[str, Any]:
    """Return the JSON value of `risk`: the published runs on which margins rest without a calibration."""
    margins = margins_of(likeness)
    own = margins.residuals
    return {
        "kind": likeness.kind.value,
        "runs": own.runs,
        "outcomes": own.verdicts.outcomes,
        "peaks": own.peaks,
        "location": round(margins.verdicts.location, 5),
        "scale": round(margins.verdicts.scale, 5),
        "departures": [departure.what for departure in likeness.departures],
        **attributes(likeness, "unlike", "lengths"),
        "parts": [
            {"what": part.what, "scale": part.scale, "rests_on": part.rests_on} for part in margins.parts
        ],
    }


def _steps(run: Replay) -> dict[str, float | None]:
    """Return the JSON entries with the peaks of the first step and of later steps.

    Peaks of steps that were not traced are null.
    """
    peaks: dict[str, float | None] = {}
    for name in ("first_step", "later_steps"):
        step = attributes(getattr(run, name), "allocated_mib", "reserved_mib")
        peaks[f"peak_{name}_mib"], peaks[f"peak_reserved_{name}_mib"] = step.values()
    return peaks


def _phase(peak: JobPhasePeak) -> dict[str, Any]:
    """Return the JSON value of a phase's peaks."""
    figures = attributes(peak, "allocated_mib", "reserved_mib")
    peaks = {f"peak_{name}": figure for name, figure in figures.items()}
    return {"name": peak.phase.value, **peaks, "covered": peak.is_planned}


def _calibration(correction: Correction | None) -> dict[str, Any] | None:
    """Return the JSON value of `calibration`, or None without a calibration.

    If only the context is calibrated, the fit's sizes and slope are null, `points` is 0 and `outliers` [].
    """
    if correction is None:
        return None
    fit = correction.fit
    return {
        "which": correction.about,
        **attributes(correction, "level", "source", "includes_context"),
        "drift_mib": mib(correction.extra_spread_bytes),
        **attributes(fit, "overhead_mib", "spread_mib", "slope"),
        "points": 0 if fit is None else fit.points,
        "outliers": [] if fit is None else list(fit.outliers),
    }


def _growth(growth: Growth | None, limit: StepLimit | None) -> dict[str, Any] | None:
    """Return the JSON value of `growth` for an estimate, or None if memory does not grow."""
    if growth is None:
        return None
    return {
        **attributes(growth, "bytes_per_step", "steps", "last_step"),
        "steps_that_fit": None if limit is None else limit.steps,
        **attributes(limit, "is_exact"),
        "garbage": growth.is_garbage,
        "sites": [_site(site) for site in growth.sites],
    }


def _site(one: GrowingSite) -> dict[str, Any]:
    source = one.source
    return {
        **attributes(one.site, "module", "op"),
        "bytes_per_step": one.bytes_per_step,
        "source": None if source is None else source.source or None,
        "code": None if source is None else source.code or None,
        "garbage": None if source is None else source.is_garbage,
    }
