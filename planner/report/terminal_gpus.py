"""`planner gpus` and `planner devices` on a terminal."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.hardware import Device
from planner.planning import CardFit, CardTable
from planner.program import Outcome
from planner.report.commands.devices import MOST_IN_FULL, cells_of, devices_text, in_full, kinds_text
from planner.report.commands.gpus import answer_lines, assumed_texts, cells_of_fit, legend_texts, took
from planner.report.layout import entry, job_text
from planner.report.terminal import TONES, bar, bullets, faint, headline, open_table, stacked
from planner.report.terminal_table import Column, NarrowingTable

_BAR_COLOURS = {"green": "#009E73", "yellow": "#E69F00", "red": "#D55E00"}


def gpus_view(table: CardTable) -> RenderableType:
    """The report of `planner gpus`."""
    tone = "green" if any(fit.max_batch for fit in table.fits) else "red"
    parts: list[RenderableType] = [headline([*answer_lines(table), *entry("Job", job_text(table.job))], tone)]
    if table.fits:
        parts += [_fits(table), bullets("", legend_texts(table))]
    return stacked([*parts, bullets("", assumed_texts(table)), faint(took(table))])


_FIT_COLUMNS = (
    Column("GPU", is_number=False),
    Column("batch"),
    Column("retrying", 6),
    Column("", 1, is_number=False),
    Column("process", 7),
    Column("at most", 2),
    Column("headroom", 4),
    Column("total MiB", 5),
    Column("how sure", 3, is_number=False),
)
_DEVICE_COLUMNS = (
    Column("GPU", is_number=False),
    Column("total", 6),
    Column("torch"),
    Column("MiB", 5, name="where its memory is from", is_number=False),
    Column("SMs", 2),
    Column("memory", 1, is_number=False),
    Column("GB/s", 3),
    Column("CC", 4, is_number=False),
)


def _fits(table: CardTable) -> NarrowingTable:
    """Bars show the largest batches beside each other, or how much of each card a given batch takes."""
    rows: list[list[RenderableType]] = []
    most = max(fit.comfortable_batch for fit in table.fits)
    for fit in table.fits:
        tone = _tone(fit, table)
        name, batch, retrying, *sizes, sure = cells_of_fit(fit)
        taken = fit.process_bytes / fit.budget.device.usable.value
        share = fit.comfortable_batch / max(1, most) if table.batch is None else taken
        used = bar(share, _BAR_COLOURS[tone], 10)
        rows.append(
            [name, Text(batch, style=f"bold {tone}"), retrying, used, *sizes, Text(sure, style="dim")]
        )
    return NarrowingTable(_FIT_COLUMNS, rows)


def _tone(fit: CardFit, table: CardTable) -> str:
    """The colour of the batch that the row leads with: the largest at full speed, or --batch."""
    if not fit.max_batch:
        return "red"
    leads = table.batch is None and fit.comfortable_batch
    return TONES[Outcome.FITS if leads else fit.outcome]


def devices_view(devices: Sequence[Device]) -> RenderableType:
    """The report of `planner devices`."""
    if not devices:
        return Text(devices_text(devices))
    if len(devices) <= MOST_IN_FULL:
        return stacked(_in_full(device) for device in devices)
    rows: list[list[RenderableType]] = []
    for device in devices:
        name, total, usable, kind, *others = cells_of(device)
        rows.append([name, total, Text(usable, style="bold"), Text(kind, style="dim"), *others])
    return stacked([NarrowingTable(_DEVICE_COLUMNS, rows), faint(kinds_text(devices))])


def _in_full(device: Device) -> Table:
    table = open_table(device.name, "", "")
    for name, figure, source in in_full(device):
        table.add_row(name, Text(figure, style="bold"), Text(source, style="dim"))
    return table
