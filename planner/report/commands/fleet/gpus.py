"""The report of `planner gpus` as document, JSON and CSV."""

from collections.abc import Iterator, Sequence
from typing import Any

from planner.hardware import PriceList
from planner.planning import Answer, DeviceFit, FleetTable, Quote
from planner.program import Outcome
from planner.report.budget import planned_job
from planner.report.commands.estimates.estimate import plan_seconds_to_json
from planner.report.commands.estimates.tables import closing_section
from planner.report.commands.estimates.verdict import STYLES, likely_text
from planner.report.describe import job_entry, short_op
from planner.report.document import Block, Bullets, Cell, Column, Document, Entry, Headline, Paragraph, Table
from planner.report.units import attributes, batch_text, csv_text, mib

_COLUMNS = (
    Column("GPU"),
    Column("batch", is_number=True),
    Column("retrying", is_number=True, rank=6),
    Column(rank=1, is_bar=True),
    Column("process", is_number=True, rank=7),
    Column("at most", is_number=True, rank=2),
    Column("headroom", is_number=True, rank=4),
    Column("total MiB", is_number=True, rank=5),
    Column("how sure", rank=3),
)
_PRICE_COLUMNS = (Column("USD/h", is_number=True), Column("instance", rank=8))
_COST_COLUMN = Column("USD/M", is_number=True)
_LESS = ("retrying", "headroom", "total MiB")  # columns that are left out if prices are shown
_BAR_COLOURS = {
    Outcome.FITS: "#009E73",
    Outcome.FITS_WITH_RETRIES: "#E69F00",
    Outcome.DOES_NOT_FIT: "#D55E00",
}
_CSV_NAMES = (
    *("gpu", "total_mib", "max_batch", "process_mib", "calibrated", "source", "batch", "fits"),
    *("process_upper_mib", "headroom_mib", "usable_mib", "usable_kind", "level", "capability", "line"),
    *("instances", "comfortable_batch", "price_per_hour", "price_per_gpu_hour", "instance"),
    *("instance_gpus", "place", "throughput", "price_per_million_samples"),
)
_NO_FIT = "-"
_MEANINGS = {
    "default": "default: no calibration of this job, margins of published runs",
    "measured": "measured: a calibration of this job on this GPU",
    "emulated": "emulated: a calibration of this job on an emulated GPU",
    "contributed": "contributed: a calibration of this job that a user has measured",
    "near": "near: one on this GPU under other versions",
    "related": "related: one on another GPU of this architecture",
    "*": "*: what torch sees of the GPU's memory is derived, not published",
}


def gpus_document(table: FleetTable) -> Document:
    """Return the report of `planner gpus`."""
    style = STYLES[Outcome.FITS if any(fit.max_batch for fit in table.fits) else Outcome.DOES_NOT_FIT]
    most = max((fit.comfortable_batch for fit in table.fits), default=0)
    rows = [_row(table, fit, most) for fit in table.fits]
    closing: list[Block] = [Paragraph(text) for text in _legend(table)] if rows else []
    assumed = list(table.notes)
    if table.unknown_ops:
        ops = ", ".join(map(short_op, table.unknown_ops))
        assumed.append(f"scratch memory is not counted for {ops}")
    closing += [Bullets("", assumed)] if assumed else []
    return Document.of(
        [Headline((_answer(table), *_likely(table), job_entry(table.job)), style)],
        [Table(_columns(table), rows, indent=0)] if rows else [],
        [*closing, *closing_section(None, table.seconds, table.import_seconds)],
    )


def _answer(table: FleetTable) -> Entry:
    """Return the entry with the number of GPUs that run the job or the given batch."""
    sure, count = f"at confidence {table.confidence:g}", len(table.fits)
    if table.batch is None:
        best = sum(1 for fit in table.fits if fit.max_batch)
        multiple = f", a multiple of {table.multiple_of}" if table.multiple_of > 1 else ""
        return Entry("Largest batch", f"on each of {count} GPUs {sure}{multiple}; {best} of them run the job")
    return Entry("Batch", f"{table.batch}: {count} of {count + table.left_out} GPUs run it {sure}")


def _likely(table: FleetTable) -> Iterator[Entry]:
    """Yield entries with the GPUs that a batch may fit, but not at the required confidence.

    One entry has the GPUs that likely fit, one the GPUs not known to fit.
    """
    for answer, title in ((Answer.LIKELY, "Likely fits"), (Answer.NOT_KNOWN, "Not known")):
        named = [
            f"batch {fit.batch} on {fit.budget.device.name}"
            + f" ({likely_text(fit.p_out_of_memory)})" * (answer is Answer.LIKELY)
            for fit in table.likely
            if fit.answer is answer
        ]
        if named:
            yield Entry(title, f"{', '.join(named)}; not at confidence {table.confidence:g}")


def _row(table: FleetTable, fit: DeviceFit, most: int) -> tuple[Cell | str, ...]:
    """Return the table row of a GPU.

    The bar shows the largest batch without retries as a share of `most` or, with --batch, the share of memory
    used.
    """
    device, outcome = fit.budget.device, _outcome(fit, table)
    taken = fit.process_bytes / device.usable.value
    share = fit.comfortable_batch / max(1, most) if table.batch is None else taken
    retrying = batch_text(fit.max_batch) if fit.max_batch > fit.comfortable_batch else _NO_FIT
    sizes = (fit.process_bytes, fit.process_upper_bytes, fit.headroom_bytes)
    cells: tuple[Cell | str, ...] = (
        device.name,
        Cell(batch_text(fit.comfortable_batch), STYLES[outcome]),
        retrying,
        Cell("", colour=_BAR_COLOURS[outcome], share=share),
        *(f"{round(mib(size)):,}" if fit.max_batch else _NO_FIT for size in sizes),
        f"{round(mib(device.total.value)):,}",
        Cell(_sure(fit), "faint"),
    )
    shown = (cell for cell, column in zip(cells, _COLUMNS, strict=True) if column in _plain_columns(table))
    return (*shown, *_prices(table, fit))


def _plain_columns(table: FleetTable) -> list[Column]:
    return [column for column in _COLUMNS if table.prices is None or column.title not in _LESS]


def _columns(table: FleetTable) -> Sequence[Column]:
    prices = () if table.prices is None else _PRICE_COLUMNS
    cost = (_COST_COLUMN,) if _has_costs(table) else ()
    return (*_plain_columns(table), *prices[:1], *cost, *prices[1:])


def _has_costs(table: FleetTable) -> bool:
    return any(quote.per_million_samples is not None for quote in table.quotes.values())


def _prices(table: FleetTable, fit: DeviceFit) -> list[str]:
    """Return the cells for price, cost and instance, or [] without a price file.

    The cost is left out if the table has no such column.
    """
    quote = table.quotes.get(fit.budget.device.name, Quote())
    offer, cost = quote.offer, quote.per_million_samples
    if table.prices is None:
        return []
    count = f" ({offer.gpus} GPUs)" if offer is not None and offer.gpus > 1 else ""
    price, instance = (
        (_NO_FIT, _NO_FIT) if offer is None else (f"{offer.price:,.2f}", f"{offer.instance}{count}")
    )
    costs = [_NO_FIT if cost is None else f"{cost:,.3f}"] if _has_costs(table) else []
    return [price, *costs, instance]


def _outcome(fit: DeviceFit, table: FleetTable) -> Outcome:
    """Return the outcome that sets the colour of a GPU's row.

    It is the outcome of the batch of --batch, else of the largest batch without retries, else of the largest
    batch that fits.
    """
    if not fit.max_batch:
        return Outcome.DOES_NOT_FIT
    leads = table.batch is None and fit.comfortable_batch
    return Outcome.FITS if leads else fit.outcome


def _sure(fit: DeviceFit) -> str:
    """Return a word such as `measured` or `default` for how well calibrated a GPU's figures are.

    It ends in "*" unless the GPU's memory is published or measured.
    """
    correction = fit.budget.correction
    words = {"exact": "measured", "same GPU": "near", "same architecture": "related"}
    if correction is None or correction.fit is None:
        word = "default"
    elif correction.source in ("emulated", "contributed"):
        word = correction.source
    else:
        word = words[correction.level.value]
    return f"{word}{'' if fit.budget.device.usable.kind.value in ('published', 'measured') else '*'}"


def _legend(table: FleetTable) -> list[str]:
    """Return sentences that explain the columns of the table: batches, memory, calibrations and prices."""
    batches = "batch: the largest that runs without retries"
    if table.prices is None and any(fit.max_batch > fit.comfortable_batch for fit in table.fits):
        batches += (
            "; retrying: a larger one that fits by retries, for which torch releases cached memory while the "
            "GPU waits"
        )
    which = f"batch {table.batch}" if table.batch else "the largest batch, retrying or not"
    columns = (
        f"process, at most, headroom: of {which}, as nvidia-smi shows it; at confidence "
        f"{table.confidence:g}; what it leaves of the memory that torch sees"
    )
    if table.prices is not None:
        columns = f"process, at most: of {which}, as nvidia-smi shows it; at confidence {table.confidence:g}"
    used = " ".join(_sure(fit) for fit in table.fits)
    meanings = "; ".join(text for word, text in _MEANINGS.items() if word in used)
    return [batches, columns, meanings, *_price_legend(table)]


def _price_legend(table: FleetTable) -> list[str]:
    """Return sentences that explain the columns of prices, or [] without a price file.

    A second line has the GPU names in the price file that the database lacks.
    """
    if table.prices is None:
        return []
    whole = "USD/h: the cheapest instance with the GPU, paid for whole; - where the file has no price"
    cost = "; USD/M: a million samples at the throughput given, on one GPU" if _has_costs(table) else ""
    unknown = ", ".join(table.prices.unknown)
    others = [f"not GPUs of the database: {unknown}"] if unknown else []
    return [f"{table.prices.sentence()}; {whole}{cost}", *others]


# ---- JSON and CSV


def gpus_to_json(table: FleetTable) -> dict[str, Any]:
    """Return the JSON object of `planner gpus`; MiB are rounded to 0.001."""
    return {
        **planned_job(table.job),
        **attributes(table, "batch", "multiple_of", "confidence"),
        "rows": [_row_to_json(table, fit) for fit in table.fits],
        "left_out": table.left_out,
        "likely": [
            {
                "gpu": fit.budget.device.name,
                "batch": fit.batch,
                "answer": fit.answer.value,
                "p_out_of_memory": fit.p_out_of_memory,
            }
            for fit in table.likely
        ],
        "prices": _prices_to_json(table.prices),
        "assumptions": list(table.notes),
        **attributes(table, "unknown_ops"),
        "seconds": plan_seconds_to_json(table.seconds, table.import_seconds),
    }


def _prices_to_json(prices: PriceList | None) -> dict[str, Any] | None:
    if prices is None:
        return None
    return {
        **attributes(prices, "file"),
        "date": prices.date.isoformat(),
        **attributes(prices, "date_source"),
        "spot": prices.is_spot,
        "unknown": list(prices.unknown),
    }


def gpus_to_csv(table: FleetTable) -> str:
    """Return the table as CSV, with one line per GPU after a header.

    Instances are separated by semicolons.
    """
    rows = [_row_to_json(table, fit) for fit in table.fits]
    for row in rows:
        row["capability"] = ".".join(map(str, row["capability"]))
        row["instances"] = "; ".join(row["instances"])
    return csv_text(_CSV_NAMES, rows).removesuffix("\n")


def _source(fit: DeviceFit) -> str:
    """Return text on the source of a GPU's margins, such as a calibration.

    It is a calibration, else published runs, else the reason why neither applies.
    """
    correction = fit.budget.correction
    if correction is None:
        likeness = fit.budget.likeness
        if likeness.unlike:
            return f"no calibration, and no run that is known {' or '.join(likeness.unlike)}"
        departures = ", ".join(departure.what for departure in likeness.departures)
        wider = f", wider {departures}" if departures else ""
        return f"no calibration: margins of published runs ({likeness.kind}){wider}"
    return f"{correction.level}: {correction.about}"


def _row_to_json(table: FleetTable, fit: DeviceFit) -> dict[str, Any]:
    quote = table.quotes.get(fit.budget.device.name, Quote())
    offer = quote.offer
    device, shown = fit.budget.device, fit if fit.max_batch else None
    return {
        "gpu": device.name,
        "total_mib": mib(device.total.value),
        "max_batch": fit.max_batch,
        **attributes(shown, "process_mib"),
        "calibrated": fit.is_calibrated,
        "source": _source(fit),
        **attributes(shown, "batch"),
        "fits": fit.outcome.value,
        **attributes(shown, "process_upper_mib", "headroom_mib"),
        "usable_mib": mib(device.usable.value),
        "usable_kind": device.usable.kind.value,
        **attributes(fit.budget.correction, "level"),
        "capability": list(device.capability),
        **attributes(device.about, "line"),
        "instances": [] if device.about is None else list(device.about.instances),
        "comfortable_batch": fit.comfortable_batch,
        "price_per_hour": quote.price,
        "price_per_gpu_hour": None if offer is None else offer.price_of_gpu,
        **attributes(offer, "instance"),
        "instance_gpus": None if offer is None else offer.gpus,
        **attributes(offer, "place"),
        "throughput": quote.throughput,
        "price_per_million_samples": quote.per_million_samples,
    }
