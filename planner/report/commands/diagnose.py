"""The report of `planner diagnose`: why memory ran out, what held it, and settings that would have helped."""

from collections.abc import Iterator
from typing import Any

from planner.planning.diagnosis import Cause, Diagnosis, GpusServing, Help, retries_text
from planner.report.document import Block, Bullets, Column, Document, Entry, Headline, Table
from planner.report.result import Report
from planner.report.units import SCHEMA, attributes, mib, mib_text

_MOST_NAMES = 4
_CAUSES = {
    Cause.TOO_LARGE: "The job needs more memory than was left",
    Cause.ONE_REQUEST: "One request was larger than all that was in use",
    Cause.FRAGMENTATION: "The memory was reserved, but fragmented",
    Cause.GROWTH: "The memory in use grew until it ended",
    Cause.OTHER_PROCESS: "The memory was held outside of this process's PyTorch",
    Cause.EVALUATION: "An evaluation needs more memory than was left",
    Cause.FIRST_STEP: "The optimizer's first step needs more memory than was left",
    Cause.KERNEL: "A kernel needs more shared memory than the GPU gives it",
    Cause.NO_FAILURE: "No failed request for GPU memory is in the file",
    Cause.UNKNOWN: "The cause is not known",
}


def diagnosis_document(diagnosis: Diagnosis, seconds: float, advice: Report | None) -> Document:
    """Return the report of `planner diagnose`, followed by `advice` if not None."""
    title = "It was not the memory of a GPU" if diagnosis.is_of_host else _CAUSES[diagnosis.cause]
    head = Headline((title, Entry("Because", diagnosis.reason)), "neutral")
    return Document.of(
        [head, *_entries(diagnosis)],
        _live(diagnosis),
        _help(diagnosis),
        [Bullets("Noted", diagnosis.notes)] if diagnosis.notes else [],
        *([] if advice is None else advice.document().sections),
    )


def _entries(diagnosis: Diagnosis) -> Iterator[Block]:
    place = diagnosis.site
    if place.line or place.operator:
        operator = f" ({place.operator})" if place.operator else ""
        yield Entry("Asked by", f"{place.line or 'code that is not named'}{operator}")
    if diagnosis.grown_by.line:
        yield Entry("Grown by", diagnosis.grown_by.line)
    sizes = {
        "asked for": diagnosis.requested_bytes,
        "allocated": diagnosis.allocated_bytes,
        "reserved": diagnosis.reserved_bytes,
        "total": diagnosis.total_bytes,
    }
    named = [f"{mib_text(size)} MiB {what}" for what, size in sizes.items() if size is not None]
    if named:
        yield Entry("Memory", ", ".join(named))
    if diagnosis.by_category:
        parts = (f"{held.what} {mib_text(held.size_bytes)} MiB" for held in diagnosis.by_category)
        yield Entry("By category", ", ".join(parts))
    if diagnosis.served_by is not None:
        yield Entry("Served by", _gpus(diagnosis.served_by, diagnosis.requested_bytes is not None))
    yield Entry("Source", diagnosis.source)


def _gpus(found: GpusServing, has_failed: bool) -> str:
    requests = "the requests up to the failed one" if has_failed else "the same requests"
    names = ", ".join(found.names[:_MOST_NAMES]) + (", ..." if len(found.names) > _MOST_NAMES else "")
    size = f"GPUs of {found.total_bytes / 2**30:,.1f} GiB"
    retries = f" after {retries_text(found.retries)}" if found.retries else ""
    smaller = "" if found.too_small is None else f"; {found.too_small} is too small"
    return (
        f"{size} and more ({names}) serve {requests}{retries}, with {mib_text(found.reserved_bytes)} MiB "
        f"reserved{smaller}"
    )


def _live(diagnosis: Diagnosis) -> list[Block]:
    if not diagnosis.live:
        return []
    rows = [
        (held.what, f"{held.blocks:,}" if held.blocks else "", mib_text(held.size_bytes))
        for held in diagnosis.live
    ]
    columns = (Column("In use"), Column("blocks", is_number=True, rank=1), Column("MiB", is_number=True))
    return [Table(columns, rows)]


def _help(diagnosis: Diagnosis) -> list[Block]:
    if not diagnosis.would_help:
        return []
    rows = [
        (
            one.setting,
            _verdict(one),
            "" if one.reserved_bytes is None else mib_text(one.reserved_bytes),
            one.reason,
        )
        for one in diagnosis.would_help
    ]
    columns = (
        Column(f"With {diagnosis.alloc_conf}"),
        Column("fits"),
        Column("MiB reserved", is_number=True, rank=1),
        Column("because", rank=2),
    )
    return [Table(columns, rows)]


def _verdict(help_: Help) -> str:
    return "not known" if help_.fits is None else "yes" if help_.fits else "no"


def diagnosis_to_json(diagnosis: Diagnosis, seconds: float, advice: Report | None) -> dict[str, Any]:
    """Return the JSON object of `planner diagnose`."""
    return {
        "schema": SCHEMA,
        "source": diagnosis.source,
        "cause": diagnosis.cause,
        "reason": diagnosis.reason,
        **attributes(diagnosis, "requested_mib", "allocated_mib", "reserved_mib", "total_mib", "is_of_host"),
        "site": {"line": diagnosis.site.line, "operator": diagnosis.site.operator},
        "grown_by": diagnosis.grown_by.line,
        "live": [
            {"what": held.what, "mib": mib(held.size_bytes), "blocks": held.blocks or None}
            for held in diagnosis.live
        ],
        "by_category": [
            {"what": held.what, "mib": mib(held.size_bytes), "blocks": held.blocks}
            for held in diagnosis.by_category
        ],
        "served_by": None if diagnosis.served_by is None else _gpus_to_json(diagnosis.served_by),
        "would_help": [
            {
                "setting": one.setting,
                "fits": one.fits,
                "peak_reserved_mib": None if one.reserved_bytes is None else mib(one.reserved_bytes),
                "reason": one.reason,
            }
            for one in diagnosis.would_help
        ],
        "notes": list(diagnosis.notes),
        "advice": None if advice is None else advice.to_json(),
        "seconds": round(seconds, 3),
    }


def _gpus_to_json(found: GpusServing) -> dict[str, Any]:
    return {
        "gpus": list(found.names),
        "total_mib": mib(found.total_bytes),
        "peak_reserved_mib": mib(found.reserved_bytes),
        "retries": found.retries,
        "too_small": found.too_small,
    }
