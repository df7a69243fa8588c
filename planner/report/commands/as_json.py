"""Plans and estimates as plain data for `json.dumps`; the keys are the contract with other programs."""

from dataclasses import asdict
from typing import Any

from planner.allocator import Replay
from planner.hardware import Budget, Likeness, SourcedBytes, margins_of
from planner.hardware.calibration import Correction
from planner.jobs import job_to_json
from planner.planning import Estimate, Plan, Seconds
from planner.planning.estimators import Method
from planner.report.assumptions import assumptions
from planner.report.commands.growth import growth_to_json
from planner.report.units import breakdown, is_endless, mib, mib_parts

SCHEMA = 1


def estimate_to_json(estimate: Estimate, import_seconds: float) -> dict[str, Any]:
    """The JSON object of `planner estimate`.

    Where the batch does not fit, `failure` tells of the run on the card and the peaks are those of a card
    without end. MiB are rounded to 0.001, the breakdown so that it adds up to `process_mib`.
    """
    run = estimate.run
    return {
        "schema": SCHEMA,
        "model": estimate.job.model,
        "batch": run.batch,
        "method": Method.TRACE.value,
        "job": job_to_json(estimate.job),
        "device": device_to_json(estimate.budget),
        "confidence": estimate.budget.confidence,
        "peak_allocated_mib": mib(run.peak_allocated_bytes),
        "peak_reserved_mib": mib(run.peak_reserved_bytes),
        **_steps(run),
        "end_allocated_mib": mib(run.end_allocated_bytes),
        "process_mib": mib(estimate.process_bytes),
        "process_upper_mib": mib(estimate.process_upper_bytes),
        "fits": estimate.outcome.value,
        "p_out_of_memory": None if estimate.p_out_of_memory is None else round(estimate.p_out_of_memory, 5),
        "risk": _risk(estimate.budget.likeness),
        "retries": (estimate.failed or run).retries,
        "retry_costs": [asdict(cost) for cost in estimate.retry_costs],
        "failure": None if estimate.failed is None else _failure(estimate.failed),
        "breakdown_mib": mib_parts(breakdown(estimate)),
        "calibration": _calibration(estimate.budget.correction),
        "growth": growth_to_json(estimate.growth, estimate.step_limit),
        "assumptions": list(assumptions(estimate)),
        "unknown_ops": list(estimate.unknown_ops),
        "seconds": _seconds(estimate.seconds, import_seconds),
    }


def plan_to_json(plan: Plan, import_seconds: float) -> dict[str, Any]:
    """The JSON object of `planner max-batch`; `probes` says of each batch what `fits` says of an estimate."""

    def nested(estimate: Estimate | None) -> dict[str, Any] | None:
        return None if estimate is None else estimate_to_json(estimate, import_seconds)

    return {
        "schema": SCHEMA,
        "model": plan.job.model,
        "method": Method.TRACE.value,
        "job": job_to_json(plan.job),
        "device": device_to_json(plan.budget),
        "confidence": plan.budget.confidence,
        "max_batch": plan.search.largest,
        "comfortable_batch": plan.search.comfortable,
        "multiple_of": plan.multiple_of,
        "no_retries": plan.no_retries,
        "answer_batch": 0 if plan.answer is None else plan.answer.run.batch,
        "at_max": nested(plan.at_max),
        "at_comfortable": nested(plan.at_comfortable),
        "first_failure": nested(plan.first_failure),
        "probes": [[batch, outcome.value] for batch, outcome in plan.search.probes],
        "seconds": _seconds(plan.seconds, import_seconds),
    }


def device_to_json(budget: Budget) -> dict[str, Any]:
    """Null stands for memory without end. `allocator` is what the replay may take at the confidence."""
    device, arena = budget.device, budget.arena
    figures = {"total": device.total, "usable": device.usable, "context": device.context}
    return {
        "name": device.name,
        **{f"{name}_mib": _figure(figure) for name, figure in figures.items()},
        "capability": list(device.capability),
        "sources": {name: figure.source for name, figure in figures.items()}
        | {"capability": device.capability_source},
        "kinds": {name: figure.kind.value for name, figure in figures.items()},
        "spreads_mib": {name: mib(figure.spread) for name, figure in figures.items()},
        "allocator": {
            "capacity_mib": None if arena.capacity_bytes is None else mib(arena.capacity_bytes),
            "limit_mib": None if arena.limit_bytes is None else mib(arena.limit_bytes),
            "cap_mib": None if budget.cap_bytes is None else mib(budget.cap_bytes),
            "rules": asdict(arena.rules),
        },
    }


def _risk(likeness: Likeness) -> dict[str, Any]:
    """What margins and probability rest on where no calibration of the job answers."""
    margins = margins_of(likeness)
    own = margins.residuals
    return {
        "kind": likeness.kind.value,
        "runs": own.runs,
        "outcomes": own.verdicts.outcomes,
        "peaks": own.peaks,
        "location": round(margins.verdicts.location, 5),
        "scale": round(margins.verdicts.scale, 5),
        "departures": list(likeness.departures),
        "unlike": list(likeness.unlike),
        "lengths": likeness.lengths.value,
    }


def _steps(run: Replay) -> dict[str, float | None]:
    """The first step, which makes the optimizer's state, and all later ones; null where none was traced."""
    first, later = run.first_step, run.later_steps
    return {
        "peak_first_step_mib": mib(first.allocated_bytes),
        "peak_later_steps_mib": None if later is None else mib(later.allocated_bytes),
        "peak_reserved_first_step_mib": mib(first.reserved_bytes),
        "peak_reserved_later_steps_mib": None if later is None else mib(later.reserved_bytes),
    }


def _calibration(correction: Correction | None) -> dict[str, Any] | None:
    """Which calibration answered and what it says; the figures are null where only its context is used."""
    if correction is None:
        return None
    fit = correction.fit
    return {
        "which": correction.about,
        "level": correction.level.value,
        "source": correction.source,
        "includes_context": correction.includes_context,
        "overhead_mib": None if fit is None else mib(fit.overhead_bytes),
        "slope": None if fit is None else fit.slope,
        "spread_mib": None if fit is None else mib(fit.spread_bytes),
        "drift_mib": mib(correction.drift_bytes),
        "points": 0 if fit is None else fit.points,
        "outliers": [] if fit is None else list(fit.outliers),
    }


def _figure(figure: SourcedBytes) -> float | None:
    return None if is_endless(figure) else mib(figure.value)


def _failure(failed: Replay) -> dict[str, Any] | None:
    failure = failed.failure
    if failure is None:
        return None
    return {
        "step": failure.step,
        "phase": failure.phase.value,
        "module": failure.module,
        "op": failure.op,
        "requested_mib": mib(failure.requested_bytes),
    }


def _seconds(seconds: Seconds, import_seconds: float) -> dict[str, float]:
    spent = {"import": import_seconds, "trace": seconds.trace, "replay": seconds.replay}
    return {name: round(value, 3) for name, value in spent.items()}
