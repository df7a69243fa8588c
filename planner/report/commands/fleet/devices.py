"""The report of `planner devices`, on the memory of GPUs and its sources."""

from collections.abc import Iterator, Sequence
from typing import Any

from planner.hardware import NOT_MODELLED, Device, SourcedBytes, SourcedValue, Vendor
from planner.report.budget import figures_to_json
from planner.report.document import Cell, Column, Document, Paragraph, Table
from planner.report.units import SCHEMA, attributes, mib_text

MAX_IN_FULL = 3  # the most GPUs that are shown with all their sources
_COLUMNS = (
    Column("GPU"),
    Column("total", is_number=True, rank=6),
    Column("torch", is_number=True),
    Column("MiB", name="where its memory is from", rank=5),
    Column("SMs", is_number=True, rank=2),
    Column("memory", rank=1),
    Column("GB/s", is_number=True, rank=3),
    Column("CC", rank=4),
)


def devices_document(devices: Sequence[Device]) -> Document:
    """Return the report of `planner devices`: a table of GPUs, or all figures and sources of up to three."""
    if not devices:
        none = "No GPU of the database matches; any other is planned for with --gpu-mib N"
        return Document.of([Paragraph(none)])
    if len(devices) <= MAX_IN_FULL:
        return Document.of(*([_in_full(device)] for device in devices))
    legend = (
        f"{len(devices)} GPUs. torch: the total that torch sees, which is what can be planned with, and "
        "where it comes from: published in logs, derived from other GPUs, unverified. Three GPUs or "
        "fewer are shown with all their sources."
    )
    table = Table(_COLUMNS, tuple(map(_row, devices)), indent=0)
    return Document.of([table], [Paragraph(legend, "faint")])


def _row(device: Device) -> tuple[Cell | str, ...]:
    about, (major, minor) = device.about, device.capability
    sm_count = "" if about is None or about.multiprocessors is None else f"{about.multiprocessors.value:.0f}"
    return (
        device.name,
        mib_text(device.total.value, 0),
        Cell(mib_text(device.usable.value, 0), "strong"),
        Cell(device.usable.kind.value, "faint"),
        sm_count,
        "" if about is None else about.memory_type,
        "" if about is None or about.bandwidth is None else f"{about.bandwidth.value:,.0f}",
        f"{major}.{minor}" if device.vendor is Vendor.NVIDIA else "-",
    )


def _in_full(device: Device) -> Table:
    """Return a table of all known figures of a GPU with their sources."""
    return Table((Column(device.name, min_width=16), Column()), tuple(_entries(device)))


def _entries(device: Device) -> Iterator[tuple[str, str]]:
    about, (major, minor) = device.about, device.capability
    if device.vendor is not Vendor.NVIDIA:
        yield "maker", f"{device.vendor.value}: {NOT_MODELLED[device.vendor]}"
    yield "total", _size(device.total)
    yield "torch sees", _size(device.usable)
    yield "context", _size(device.context)
    yield "capability", f"{major}.{minor} ({device.capability_source})"
    if about is not None:
        if about.multiprocessors is not None:
            yield "SMs", _noted(about.multiprocessors)
        if about.bandwidth is not None:
            yield "memory", f"{about.memory_type}, {_noted(about.bandwidth, ' GB/s')}"
        yield "made for", about.line.value
        if about.instances:
            yield "rented as", f"{', '.join(about.instances)} ({about.instances_source})"
    yield "also called", ", ".join(device.aliases) or "-"


def _size(figure: SourcedBytes) -> str:
    spread = f" +- {mib_text(figure.spread, 0)}" if figure.spread else ""
    return f"{mib_text(figure.value, 0)}{spread} MiB, {figure.kind.value}: {figure.source}"


def _noted(figure: SourcedValue, unit: str = "") -> str:
    return f"{figure.value:,.0f}{unit}, {figure.kind.value}: {figure.source}"


def devices_to_json(devices: Sequence[Device]) -> dict[str, Any]:
    """Return the JSON object of `planner devices`."""
    return {"schema": SCHEMA, "devices": [_device_to_json(device) for device in devices]}


def _device_to_json(device: Device) -> dict[str, Any]:
    about = device.about
    return {
        **figures_to_json(device),
        "vendor": device.vendor.value,
        **attributes(device, "aliases"),
        **attributes(about, "line"),
        "multiprocessors": None if about is None else _noted_to_json(about.multiprocessors),
        "memory_type": None if about is None else about.memory_type or None,
        "bandwidth_gb_per_second": None if about is None else _noted_to_json(about.bandwidth),
        "instances": [] if about is None else list(about.instances),
    }


def _noted_to_json(figure: SourcedValue | None) -> dict[str, Any] | None:
    return None if figure is None else attributes(figure, "value", "kind", "source")
