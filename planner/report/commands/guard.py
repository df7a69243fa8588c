"""The report of `planner.guard`: measured and planned peaks of a training run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration.verify import Verification
from planner.hardware.calibration import Observation
from planner.planning import Estimate
from planner.report.commands.calibrations.verify import measured_figures, peaks_table
from planner.report.commands.estimates.estimate import estimate_to_json
from planner.report.document import Bullets, Cell, Column, Document, Headline, Style, Table
from planner.report.units import NAME_WIDTH, SCHEMA, mib_column, mib_text


def guard_document(
    estimate: Estimate | None, observation: Observation, steps: int, remarks: Sequence[str]
) -> Document:
    """Return the report on a training run's measured peaks, next to the planned peaks if there are any."""
    seen = observation
    if estimate is None:
        answer = f"Guard: {_ending(seen, steps)}; there is no plan to hold it against"
        return Document.of([Headline((answer,), "warning")], [_peaks(seen)], _bullets(remarks))
    run = Verification(estimate, seen)
    verdict = "as planned" if run.holds else "NOT as planned"
    answer = f"Guard: {seen.job.model.name} at batch {seen.batch:,}: {_ending(seen, steps)}, {verdict}"
    style: Style = "good" if run.holds else "bad"
    return Document.of([Headline((answer,), style)], [peaks_table(run)], _bullets(remarks))


def _ending(seen: Observation, steps: int) -> str:
    count = f"{steps:,} step{'' if steps == 1 else 's'}"
    return f"out of memory after {count}" if seen.oom else f"{count} {seen.source}"


def _bullets(remarks: Sequence[str]) -> list[Bullets]:
    return [Bullets("Notes", tuple(remarks))] if remarks else []


def _peaks(seen: Observation) -> Table:
    columns = (Column(seen.gpu, min_width=NAME_WIDTH), mib_column(f"MiB {seen.source}"))
    sizes = (seen.peak_allocated_bytes, seen.peak_reserved_bytes, seen.process_peak_bytes)
    names = ("peak allocated", "peak reserved", "process")
    cells = ["-" if size is None else Cell(mib_text(size), "strong") for size in sizes]
    return Table(columns, list(zip(names, cells, strict=True)))


def guard_to_json(
    estimate: Estimate | None,
    observation: Observation,
    steps: int,
    stored: Path | None,
    remarks: Sequence[str],
) -> dict[str, Any]:
    """Return the JSON object of a `GuardResult`. `errors` are estimated / measured - 1."""
    seen = observation
    run = None if estimate is None else Verification(estimate, seen)
    return {
        "schema": SCHEMA,
        "model": seen.job.model.name,
        "batch": None if run is None else seen.batch,
        "gpu": seen.gpu,
        "steps": steps,
        "out_of_memory": seen.oom,
        "holds": None if run is None else run.holds,
        "errors": {} if run is None else {name: round(error, 6) for name, error in run.errors.items()},
        **measured_figures(seen),
        "stored": None if stored is None else str(stored),
        "remarks": list(remarks),
        "estimate": None if estimate is None else estimate_to_json(estimate, 0.0),
    }
