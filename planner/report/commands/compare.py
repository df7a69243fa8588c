"""The report of `planner compare`, as text and as plain data for `json.dumps`."""

from typing import Any

from planner.jobs import job_to_json
from planner.planning.estimators import ALLOCATED, COUNTS, NAMES, Comparison, Measured, Method, Row, Source
from planner.program import Outcome
from planner.report.commands.as_json import SCHEMA, device_to_json
from planner.report.layout import DIGITS, doing, signed_percent, wrapped
from planner.report.units import is_endless, mib

_NAME = 20  # columns
_FITS = {Outcome.FITS: "yes", Outcome.FITS_WITH_RETRIES: "retries", Outcome.DOES_NOT_FIT: "no"}


def comparison_text(comparison: Comparison) -> str:
    """A table of all estimators, the measured value with its arithmetic, and what the errors refer to."""
    job, device = comparison.job, comparison.budget.device
    card = "" if is_endless(device.usable) else f", {device.name}"
    lines = [f"{job.model}, batch {comparison.batch}{card}: {doing(job)}", "", _heading(comparison)]
    for row in comparison.rows:
        lines += _row(comparison, row)
    lines += [
        "",
        *(_measured_table(comparison, comparison.measured) if comparison.measured else _none(comparison)),
    ]
    return "\n".join([*lines, f"Took {comparison.seconds:.1f} s"])


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """The JSON object of `planner compare`; `error` is a signed share of the row's `against_mib`."""
    return {
        "schema": SCHEMA,
        "model": comparison.job.model,
        "batch": comparison.batch,
        "job": job_to_json(comparison.job),
        "device": device_to_json(comparison.budget),
        "rows": [_row_to_json(row) for row in comparison.rows],
        "measured": None if comparison.measured is None else _measured_to_json(comparison.measured),
        "unmeasured": comparison.unmeasured,
        "seconds": round(comparison.seconds, 3),
    }


def _heading(comparison: Comparison) -> str:
    against = "error" if comparison.measured else "vs ours"
    fits = f"{'fits':>9}" if _has_card(comparison) else ""
    return f"  {'estimator':<{_NAME}}{'MiB':>10}{against:>10}{fits}  counts"


def _row(comparison: Comparison, row: Row) -> list[str]:
    size = "-" if row.size_bytes is None else f"{mib(row.size_bytes, DIGITS):,.1f}"
    error = "" if row.error is None else signed_percent(row.error)
    fits = f"{_FITS[row.fits] if row.fits else '':>9}" if _has_card(comparison) else ""
    beginning = f"  {NAMES[row.key]:<{_NAME}}{size:>10}{error:>10}{fits}  "
    return wrapped(beginning, f"refused: {row.reason}" if row.reason else COUNTS[row.key])


def _has_card(comparison: Comparison) -> bool:
    return any(row.fits for row in comparison.rows)


def _none(comparison: Comparison) -> list[str]:
    said = f"{comparison.unmeasured}; the differences above are from this planner's allocated."
    return wrapped("", said[0].upper() + said[1:])


def _measured_table(comparison: Comparison, measured: Measured) -> list[str]:
    lines = [f"  {'measured':<{_NAME}}{'MiB':>10}"]
    lines += _sized("peak allocated", measured.printed_bytes, source_text(measured.source))
    for kept in measured.kept:
        remark = "stayed on the GPU from before, with its gradients"
        lines += _sized(f"less {kept.model}", -kept.size_bytes, remark)
    if measured.kept:
        lines += _sized("this model alone", measured.allocated_bytes, "what the errors above refer to")
    if measured.own_reserved_bytes is not None:
        less = ", less the same, though their segments hold more" if measured.kept else ""
        when = "at the end" if measured.process_bytes is None else "at its peak"
        remark = f"{when}{less}; for `planner, reserved`"
        lines += _sized("reserved", measured.own_reserved_bytes, remark)
    if measured.process_bytes is not None:
        lines += _sized("process", measured.process_bytes, "as NVML showed it; for `planner, process`")
    return [*lines, *_flattered(comparison, measured)]


def _sized(name: str, size_bytes: float, remark: str) -> list[str]:
    return wrapped(f"  {name:<{_NAME}}{round(size_bytes / 2**20, DIGITS):>10,.1f}  ", remark)


def _flattered(comparison: Comparison, measured: Measured) -> list[str]:
    """What the errors would be if the earlier models were taken for a part of this one."""
    if not measured.kept:
        return []
    sizes = {row.key: row.size_bytes for row in comparison.rows}
    errors = [
        f"{NAMES[key]} {signed_percent(size / measured.printed_bytes - 1)}"
        for key in (Method.FORMULA, Method.MEMTRACKER, ALLOCATED)
        if (size := sizes.get(key)) is not None
    ]
    said = "Held against the printed peak, which holds the earlier models too, the errors would read "
    return ["", *wrapped("", f"{said}{'; '.join(errors)}.")]


def source_text(source: Source) -> str:
    """Where a measured figure comes from."""
    shown = {"torch": "torch", "cuda": "CUDA"}
    versions = "".join(f", {shown[name]} {version}" for name, version in source.versions if name in shown)
    return f"{source.title}{versions}; GPU {source.gpu or 'not told'}"


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        "estimator": str(row.key),
        "mib": None if row.size_bytes is None else mib(row.size_bytes),
        "against_mib": None if row.yardstick_bytes is None else round(row.yardstick_bytes / 2**20, 3),
        "error": None if row.error is None else round(row.error, 5),
        "fits": row.fits.value if row.fits else None,
        "counts": COUNTS[row.key],
        "reason": row.reason,
    }


def _measured_to_json(measured: Measured) -> dict[str, Any]:
    reserved = measured.own_reserved_bytes
    return {
        "printed_mib": round(measured.printed_bytes / 2**20, 3),
        "kept_mib": {kept.model: mib(kept.size_bytes) for kept in measured.kept},
        "allocated_mib": round(measured.allocated_bytes / 2**20, 3),
        "reserved_mib": None if reserved is None else round(reserved / 2**20, 3),
        "process_mib": None if measured.process_bytes is None else mib(measured.process_bytes),
        "source": source_text(measured.source),
    }
