"""The table to read before buying or renting, as text, JSON and CSV."""

import csv
import io
from typing import Any

from planner.jobs import job_to_json
from planner.planning import LARGEST_BATCH, CardFit, CardTable
from planner.report.assumptions import short_op
from planner.report.commands.as_json import SCHEMA
from planner.report.layout import entry, job_text, time_text, wrapped
from planner.report.units import mib

_NAMES = 28
_COLUMNS = ("batch", "retrying", "process", "at most", "headroom", "total")
_NO_FIT = "-"


def gpus_to_json(table: CardTable) -> dict[str, Any]:
    """The JSON object of `planner gpus`; MiB are rounded to 0.001."""
    return {
        "schema": SCHEMA,
        "model": table.job.model,
        "job": job_to_json(table.job),
        "batch": table.batch,
        "multiple_of": table.multiple_of,
        "confidence": table.confidence,
        "rows": [_row(fit) for fit in table.fits],
        "left_out": table.left_out,
        "assumptions": list(table.notes),
        "unknown_ops": list(table.unknown_ops),
        "seconds": {
            "import": round(table.import_seconds, 3),
            "trace": round(table.seconds.trace, 3),
            "replay": round(table.seconds.replay, 3),
        },
    }


def gpus_to_csv(table: CardTable) -> str:
    """A line of names, then one for each card; instances are separated by semicolons."""
    text = io.StringIO()
    rows = [_row(fit) for fit in table.fits]
    names = (
        list(rows[0]) if rows else ["gpu", "total_mib", "max_batch", "process_mib", "calibrated", "source"]
    )
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        flat = {"capability": ".".join(map(str, row["capability"])), "instances": "; ".join(row["instances"])}
        writer.writerow(row | flat)
    return text.getvalue().removesuffix("\n")


def gpus_text(table: CardTable) -> str:
    """The report of `planner gpus`, at most 100 columns wide."""
    lines = [*answer_lines(table), *entry("Job", job_text(table.job)), ""]
    if table.fits:
        lines += [_heading(), *(_line(fit) for fit in table.fits), ""]
        lines += [line for text in legend_texts(table) for line in wrapped("", text)]
    lines += [line for text in assumed_texts(table) for line in wrapped("  - ", text)]
    return "\n".join([*lines, took(table)])


def source_of(fit: CardFit) -> str:
    """What stands behind the figures: a calibration and how near it is, or the published residuals."""
    correction = fit.budget.correction
    if correction is None:
        likeness = fit.budget.likeness
        if likeness.unlike:
            return f"no calibration, and no published run {' or '.join(likeness.unlike)}"
        wider = f", wider: none is {' or '.join(likeness.departures)}" if likeness.departures else ""
        return f"no calibration: margins of published runs ({likeness.kind}){wider}"
    return f"{correction.level}: {correction.about}"


def _row(fit: CardFit) -> dict[str, Any]:
    device, fits = fit.budget.device, bool(fit.max_batch)
    correction = fit.budget.correction
    about = device.about
    return {
        "gpu": device.name,
        "total_mib": mib(device.total.value),
        "max_batch": fit.max_batch,
        "process_mib": mib(fit.process_bytes) if fits else None,
        "calibrated": fit.is_calibrated,
        "source": source_of(fit),
        "batch": fit.batch if fits else None,
        "fits": fit.outcome.value,
        "process_upper_mib": mib(fit.process_upper_bytes) if fits else None,
        "headroom_mib": mib(fit.headroom_bytes) if fits else None,
        "usable_mib": mib(device.usable.value),
        "usable_kind": device.usable.kind.value,
        "level": None if correction is None else correction.level.value,
        "capability": list(device.capability),
        "line": None if about is None else about.line.value,
        "instances": [] if about is None else list(about.instances),
        "comfortable_batch": fit.comfortable_batch,
    }


def answer_lines(table: CardTable) -> list[str]:
    """How many cards run it."""
    sure, count = f"at confidence {table.confidence:g}", len(table.fits)
    if table.batch is None:
        best = sum(1 for fit in table.fits if fit.max_batch)
        multiple = f", a multiple of {table.multiple_of}" if table.multiple_of > 1 else ""
        return entry("Largest batch", f"of {count} GPUs {sure}{multiple}; {best} of them run the job")
    return entry("Batch", f"{table.batch}: {count} of {count + table.left_out} GPUs run it {sure}")


def _heading() -> str:
    return f"{'GPU':<{_NAMES}}" + "".join(f"{name:>9}" for name in _COLUMNS) + "  MiB  how sure"


def _line(fit: CardFit) -> str:
    name, *cells, sure = cells_of_fit(fit)
    return f"{name:<{_NAMES}.{_NAMES}}" + "".join(f"{cell:>9}" for cell in cells) + f"       {sure}"


def cells_of_fit(fit: CardFit) -> tuple[str, ...]:
    """One card's row: name, batch, that with retries, process, at most, headroom, total, how sure."""
    device = fit.budget.device
    at_ease = _batch(fit.comfortable_batch)
    retrying = _batch(fit.max_batch) if fit.max_batch > fit.comfortable_batch else _NO_FIT
    sizes = (fit.process_bytes, fit.process_upper_bytes, fit.headroom_bytes)
    shown = [f"{round(mib(size)):,}" if fit.max_batch else _NO_FIT for size in sizes]
    total = f"{round(mib(device.total.value)):,}"
    return (device.name, at_ease, retrying, *shown, total, _sure(fit))


def _batch(size: int) -> str:
    if size >= LARGEST_BATCH:
        return "any"
    return f"{size:,}" if size else "none"


def _sure(fit: CardFit) -> str:
    """One word for the calibration, and a mark where the card's memory is not published."""
    correction = fit.budget.correction
    words = {"exact": "measured", "same GPU": "near", "same architecture": "related"}
    if correction is None or correction.fit is None:
        word = "default"
    elif correction.source == "emulated":
        word = "emulated"
    else:
        word = words[correction.level.value]
    return f"{word}{'' if fit.budget.device.usable.kind.value in ('published', 'measured') else '*'}"


def legend_texts(table: CardTable) -> list[str]:
    """What the columns mean, as far as they are used."""
    batches = "batch: the largest that runs without retries"
    if any(fit.max_batch > fit.comfortable_batch for fit in table.fits):
        batches += (
            "; retrying: a larger one that fits by retries, for which torch releases cached memory while the "
            "GPU stands still"
        )
    which = f"batch {table.batch}" if table.batch else "the largest batch, retrying or not"
    columns = (
        f"process, at most, headroom: of {which}, as nvidia-smi shows it; at confidence "
        f"{table.confidence:g}; what it leaves of the memory that torch sees"
    )
    meanings = {
        "default": "default: no calibration of this job, margins of published runs",
        "measured": "measured: a calibration of this job on this GPU",
        "emulated": "emulated: a calibration of this job on an emulated GPU",
        "near": "near: one on this GPU under other versions",
        "related": "related: one on another GPU of this architecture",
        "*": "*: what torch sees of the card's memory is derived, not published",
    }
    used = {_sure(fit) for fit in table.fits}
    words = {word.rstrip("*") for word in used} | ({"*"} if any("*" in word for word in used) else set())
    return [batches, columns, "; ".join(text for word, text in meanings.items() if word in words)]


def assumed_texts(table: CardTable) -> list[str]:
    """What the table takes for granted."""
    texts = list(table.notes)
    if table.unknown_ops:
        texts.append(f"scratch memory is not counted for {', '.join(map(short_op, table.unknown_ops))}")
    return texts


def took(table: CardTable) -> str:
    """Where the seconds went."""
    spent = table.seconds
    return time_text({"importing": table.import_seconds, "tracing": spent.trace, "replaying": spent.replay})
