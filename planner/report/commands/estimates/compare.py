"""The report of `planner compare`."""

from collections.abc import Iterator
from typing import Any

from planner.planning.estimators import ALLOCATED, COUNTS, NAMES, Comparison, Measured, Method, Row, Source
from planner.program import Outcome
from planner.report.budget import job_to_report
from planner.report.describe import describe_loop
from planner.report.document import Block, Cell, Column, Document, Headline, Paragraph, Table
from planner.report.units import (
    attributes,
    is_endless,
    memory_table,
    mib,
    mib_column,
    mib_text,
    signed_percent,
)

_NAME_WIDTH = 20
_FITS = {Outcome.FITS: "yes", Outcome.FITS_WITH_RETRIES: "retries", Outcome.DOES_NOT_FIT: "no"}


def comparison_document(comparison: Comparison) -> Document:
    """Return the report of `planner compare`: all estimates, and the measured peak or why there is none."""
    job, device, measured = comparison.job, comparison.budget.device, comparison.measured
    gpu = "" if is_endless(device.usable) else f", {device.name}"
    title = f"{job.model.name}, batch {comparison.batch}{gpu}: {describe_loop(job)}"
    none = f"{comparison.unmeasured}; the differences above are from this planner's allocated."
    return Document.of(
        [Headline((title,), "neutral")],
        [_estimators(comparison)],
        [Paragraph(none[0].upper() + none[1:])]
        if measured is None
        else [memory_table("measured", _measured(measured), _NAME_WIDTH)],
        *([_printed(comparison, measured)] if measured is not None and measured.residents else []),
        [Paragraph(f"Took {comparison.seconds:.1f} s", "faint")],
    )


def _estimators(comparison: Comparison) -> Table:
    has_gpu = any(row.fits for row in comparison.rows)
    columns = [
        Column("estimator", min_width=_NAME_WIDTH),
        mib_column(),
        Column("error" if comparison.measured else "vs ours", is_number=True, min_width=8),
        *([Column("fits", is_number=True, min_width=7)] if has_gpu else []),
        Column("counts"),
    ]
    return Table(tuple(columns), tuple(tuple(_cells(row, has_gpu)) for row in comparison.rows))


def _cells(row: Row, has_gpu: bool) -> Iterator[Cell | str]:
    yield NAMES[row.key]
    yield "-" if row.size_bytes is None else Cell(mib_text(row.size_bytes), "strong")
    yield "" if row.error is None else signed_percent(row.error)
    if has_gpu:
        yield _FITS[row.fits] if row.fits is not None else ""
    yield Cell(f"refused: {row.reason}" if row.reason else COUNTS[row.key], "faint")


def _measured(measured: Measured) -> Iterator[tuple[str, float, str]]:
    yield "peak allocated", measured.printed_bytes, source_text(measured.source)
    for resident in measured.residents:
        stayed = "stayed on the GPU from before, with its gradients"
        yield f"less {resident.model}", -resident.size_bytes, stayed
    if measured.residents:
        yield "this model alone", measured.allocated_bytes, "what the errors above refer to"
    if measured.own_reserved_bytes is not None:
        less = ", less the same, though their segments hold more" if measured.residents else ""
        when = "at the end" if measured.process_bytes is None else "at its peak"
        yield "reserved", measured.own_reserved_bytes, f"{when}{less}; for `planner, reserved`"
    if measured.process_bytes is not None:
        yield "process", measured.process_bytes, "as NVML showed it; for `planner, process`"


def _printed(comparison: Comparison, measured: Measured) -> list[Block]:
    """Return a paragraph with the errors of the formula, MemTracker and planner against the printed peak.

    The printed peak includes the memory of earlier models.
    """
    sizes = {row.key: row.size_bytes for row in comparison.rows}
    errors = [
        f"{NAMES[key]} {signed_percent(size / measured.printed_bytes - 1)}"
        for key in (Method.FORMULA, Method.MEMTRACKER, ALLOCATED)
        if (size := sizes.get(key)) is not None
    ]
    start = "Held against the printed peak, which holds the earlier models too, the errors would read "
    return [Paragraph(f"{start}{'; '.join(errors)}.")]


def source_text(source: Source) -> str:
    """Return text on the source of a measured figure: title, versions and GPU."""
    shown = {"torch": "torch", "cuda": "CUDA"}
    versions = "".join(
        f", {shown[name]} {version}" for name, version in source.versions.items() if name in shown
    )
    return f"{source.title}{versions}; GPU {source.gpu or 'unknown'}"


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the JSON object of `planner compare`. `error` is relative to the row's `against_mib`."""
    return {
        **job_to_report(comparison.job, comparison.budget),
        "batch": comparison.batch,
        "rows": [_row_to_json(row) for row in comparison.rows],
        "measured": None if comparison.measured is None else _measured_to_json(comparison.measured),
        "unmeasured": comparison.unmeasured,
        "seconds": round(comparison.seconds, 3),
    }


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        "estimator": str(row.key),
        "mib": None if row.size_bytes is None else mib(row.size_bytes),
        "against_mib": None if row.yardstick_bytes is None else mib(row.yardstick_bytes),
        "error": None if row.error is None else round(row.error, 5),
        "fits": row.fits.value if row.fits is not None else None,
        "counts": COUNTS[row.key],
        "reason": row.reason,
    }


def _measured_to_json(measured: Measured) -> dict[str, Any]:
    return {
        **attributes(measured, "printed_mib", "allocated_mib", "process_mib"),
        "kept_mib": {one.model: mib(one.size_bytes) for one in measured.residents},
        "reserved_mib": attributes(measured, "own_reserved_mib")["own_reserved_mib"],
        "source": source_text(measured.source),
    }
