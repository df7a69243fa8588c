"""The device database as text and as plain data: each figure with the kind of its source."""

from collections.abc import Sequence
from typing import Any

from planner.hardware import Device, FigureKind, SourcedBytes, SourcedValue
from planner.report.commands.as_json import SCHEMA
from planner.report.layout import DIGITS, entry, wrapped
from planner.report.units import mib

_NAMES = 33
MOST_IN_FULL = 3  # cards that are shown with all their sources


def devices_to_json(devices: Sequence[Device]) -> dict[str, Any]:
    """The JSON object of `planner devices`."""
    return {"schema": SCHEMA, "devices": [_card(device) for device in devices]}


def devices_text(devices: Sequence[Device]) -> str:
    """A table, at most 100 columns wide; up to three cards in full, with their sources."""
    if not devices:
        return "No card of the database matches; any other is planned for with --gpu-mib N"
    if len(devices) <= MOST_IN_FULL:
        return "\n\n".join("\n".join(_card_lines(device)) for device in devices)
    heading = (
        f"{'GPU':<{_NAMES}}{'total':>9}{'torch':>9} MiB  {'':10}{'SMs':>4}  {'memory':<8}{'GB/s':>6}  CC"
    )
    return "\n".join([heading, *map(_line, devices), "", *wrapped("", kinds_text(devices))])


def kinds_text(devices: Sequence[Device]) -> str:
    """What stands under the table."""
    return (
        f"{len(devices)} GPUs. torch: the total that torch sees, which is what can be planned with, and "
        "where it comes from: published in logs, derived from other cards, unverified. Three cards or "
        "fewer are shown with all their sources."
    )


def _line(device: Device) -> str:
    name, total, usable, kind, processors, memory, bandwidth, capability = cells_of(device)
    return (
        f"{name:<{_NAMES}.{_NAMES}}{total:>9}{usable:>9}      {kind:<10}"
        f"{processors:>4}  {memory:<8}{bandwidth:>6}  {capability}"
    )


def cells_of(device: Device) -> tuple[str, ...]:
    """One card's row: name, total, what torch sees and how sure, SMs, memory, GB/s, compute capability."""
    about, (major, minor) = device.about, device.capability
    processors = (
        "" if about is None or about.multiprocessors is None else f"{about.multiprocessors.value:.0f}"
    )
    memory = "" if about is None else about.memory_type
    bandwidth = "" if about is None or about.bandwidth is None else f"{about.bandwidth.value:,.0f}"
    total, usable = (f"{round(mib(figure.value)):,}" for figure in (device.total, device.usable))
    kind = device.usable.kind.value
    return device.name, total, usable, kind, processors, memory, bandwidth, f"{major}.{minor}"


def _card_lines(device: Device) -> list[str]:
    lines = [device.name]
    for name, figure, source in in_full(device):
        joint = "" if not source else " " if source.startswith("(") else ", "
        lines += _entry(name, f"{figure}{joint}{source}")
    return lines


def in_full(device: Device) -> list[tuple[str, str, str]]:
    """Everything that is known of a card: names, figures, and where they come from."""
    about, (major, minor) = device.about, device.capability
    rows = [
        ("total", *_size(device.total)),
        ("torch sees", *_size(device.usable)),
        ("context", *_size(device.context)),
        ("capability", f"{major}.{minor}", f"({device.capability_source})"),
    ]
    if about is not None:
        if about.multiprocessors is not None:
            rows.append(("SMs", *_noted(about.multiprocessors, "")))
        if about.bandwidth is not None:
            figure, source = _noted(about.bandwidth, " GB/s")
            rows.append(("memory", f"{about.memory_type}, {figure}", source))
        rows.append(("made for", about.line.value, ""))
        if about.instances:
            rows.append(("rented as", ", ".join(about.instances), f"({about.instances_source})"))
    return [*rows, ("also called", ", ".join(device.aliases) or "-", "")]


def _entry(name: str, text: str) -> list[str]:
    return (
        ["  " + line for line in entry(name, text)]
        if len(text) < 80
        else wrapped(f"  {name + ':':<16}", text)
    )


def _size(figure: SourcedBytes) -> tuple[str, str]:
    spread = f" +- {mib(figure.spread, DIGITS):,.0f}" if figure.spread else ""
    return f"{mib(figure.value, DIGITS):,.0f}{spread} MiB", f"{figure.kind.value}: {figure.source}"


def _noted(figure: SourcedValue, unit: str) -> tuple[str, str]:
    return f"{figure.value:,.0f}{unit}", f"{figure.kind.value}: {figure.source}"


def _card(device: Device) -> dict[str, Any]:
    about = device.about
    figures = {"total": device.total, "usable": device.usable, "context": device.context}
    return {
        "name": device.name,
        "aliases": list(device.aliases),
        "capability": list(device.capability),
        **{f"{name}_mib": mib(figure.value) for name, figure in figures.items()},
        "spreads_mib": {name: mib(figure.spread) for name, figure in figures.items()},
        "kinds": {name: figure.kind.value for name, figure in figures.items()},
        "sources": {name: figure.source for name, figure in figures.items()}
        | {"capability": device.capability_source},
        "line": None if about is None else about.line.value,
        "multiprocessors": None if about is None else _noted_json(about.multiprocessors),
        "memory_type": None if about is None else about.memory_type or None,
        "bandwidth_gb_per_second": None if about is None else _noted_json(about.bandwidth),
        "instances": [] if about is None else list(about.instances),
    }


def _noted_json(figure: SourcedValue | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {"value": figure.value, "kind": FigureKind(figure.kind).value, "source": figure.source}
