"""The reports of `planner verify`, which compare runs with their predictions."""

from typing import Any

from calibration.verify import LimitCheck, Verification
from planner.hardware.calibration import Observation
from planner.report.commands.estimates.estimate import estimate_to_json
from planner.report.describe import job_entry
from planner.report.document import Block, Cell, Column, Document, Headline, Paragraph, Style, Table
from planner.report.units import NAME_WIDTH, SCHEMA, attributes, mib_column, mib_text, signed_percent

_PREDICTIONS = {
    "yes": "predicted to fit",
    "with_retries": "predicted to fit with retries",
    "no": "predicted not to fit",
}
_FIGURES = (
    *("peak_allocated_mib", "peak_reserved_mib", "end_allocated_mib", "process_peak_mib"),
    *("context_before_mib", "context_after_mib", "retries", "oom"),
)


def verification_document(verification: Verification) -> Document:
    """Return the report of `planner verify` with a batch, which compares a run with its estimate."""
    estimate, observation = verification.estimate, verification.observation
    start = _start(observation, estimate.budget.confidence, verification.holds)
    answer = f"{start}: batch {observation.batch} {_outcome(verification)}"
    return Document.of(
        [Headline((answer, job_entry(estimate.job)), _style(verification.holds))], [peaks_table(verification)]
    )


def limit_document(check: LimitCheck) -> Document:
    """Return the report of `planner verify` without a batch: the predicted largest batch and runs near it."""
    plan = check.plan
    observation = check.runs[0].observation if check.runs else None
    start = _start(observation, plan.budget.confidence, check.holds)
    answer = f"{start}: the largest batch was predicted to be {plan.search.largest}; {_bracket(check)}"
    return Document.of(
        [Headline((answer, job_entry(plan.job)), _style(check.holds))],
        *(_run_section(run) for run in check.runs),
    )


def _run_section(run: Verification) -> list[Block]:
    text = f"Batch {run.observation.batch} {_outcome(run)}"
    return [Paragraph(text, _style(run.holds)), *([peaks_table(run)] if run.ran else [])]


def _style(holds: bool) -> Style:
    return "good" if holds else "bad"


def _start(observation: Observation | None, confidence: float, holds: bool) -> str:
    verdict = "held" if holds else "did NOT hold"
    if observation is not None and observation.source == "emulated":
        return f"Emulated, not measured; there confidence {confidence:g} {verdict}"
    return f"Confidence {confidence:g} {verdict}"


def _bracket(check: LimitCheck) -> str:
    """Return a phrase on the true largest batch, as far as the runs show it."""
    lived, died = check.lived, check.died
    if died is None:
        return f"{lived} ran as well, and nothing larger was tried" if lived else "nothing was tried"
    if not lived:
        return f"it is smaller than {died}"
    return f"it is {lived}" if died - lived == 1 else f"it is from {lived} to {died - 1}"


def _outcome(run: Verification) -> str:
    """Return a phrase on the predicted and the actual outcome of a run."""
    predicted = _PREDICTIONS[run.estimate.outcome.value]
    if not run.ran:
        return f"was {predicted} and ran out of memory"
    return f"was {predicted} and ran{'' if run.holds else ', but exceeded the upper bound'}"


def peaks_table(run: Verification) -> Table:
    """Return a table that compares a run's predicted peaks with its measured or emulated peaks."""
    estimate, seen = run.estimate, run.observation
    columns = (
        Column(seen.gpu, min_width=NAME_WIDTH),
        *map(mib_column, ("predicted MiB", seen.source)),
        Column("error", is_number=True, min_width=7),
    )
    rows = (
        ("allocated", "peak allocated", estimate.run.peak_allocated_bytes, seen.peak_allocated_bytes),
        ("reserved", "peak reserved", estimate.run.peak_reserved_bytes, seen.peak_reserved_bytes),
        ("process", "process", estimate.process_bytes, seen.process_peak_bytes),
        ("", "process, at most", estimate.process_upper_bytes, None),
    )
    cells = [
        (
            title,
            mib_text(predicted),
            "-" if size is None else Cell(mib_text(size), "strong"),
            signed_percent(run.errors[name]) if name in run.errors else "-",
        )
        for name, title, predicted, size in rows
    ]
    return Table(columns, cells)


def verification_to_json(verification: Verification, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner verify` with a batch. `errors` are estimated / measured - 1."""
    seen = verification.observation
    return {
        "schema": SCHEMA,
        "model": seen.job.model.name,
        "batch": seen.batch,
        "gpu": seen.gpu,
        **attributes(verification, "ran", "agrees", "holds"),
        "verdict": _verdict(seen, verification.holds),
        "errors": {name: round(error, 6) for name, error in verification.errors.items()},
        **measured_figures(seen),
        "estimate": estimate_to_json(verification.estimate, import_seconds),
    }


def measured_figures(seen: Observation) -> dict[str, Any]:
    """Return a run's figures under `measured` or `emulated`, by its source, with None under the other.

    The figures, for JSON, are peaks and context in MiB, retries and `oom`.
    """
    figures, emulated = attributes(seen, *_FIGURES), seen.source == "emulated"
    return {"measured": None if emulated else figures, "emulated": figures if emulated else None}


def limit_to_json(check: LimitCheck, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner verify` without a batch.

    `runs` are objects of single runs. `true_largest` is the range of the true largest batch, as far as the
    runs show it.
    """
    observation = check.runs[0].observation if check.runs else None
    return {
        "schema": SCHEMA,
        "model": check.plan.job.model.name,
        **attributes(observation, "gpu"),
        "confidence": check.plan.budget.confidence,
        "max_batch": check.plan.search.largest,
        "holds": check.holds,
        "verdict": _verdict(observation, check.holds),
        "true_largest": {"at_least": check.lived, "at_most": None if check.died is None else check.died - 1},
        "runs": [verification_to_json(run, import_seconds) for run in check.runs],
    }


def _verdict(observation: Observation | None, holds: bool) -> str:
    """Return "held" or "did not hold", or "emulated" for an emulated run.

    An emulated GPU proves nothing about a real GPU's context and kernels.
    """
    if observation is not None and observation.source == "emulated":
        return "emulated"
    return "held" if holds else "did not hold"
