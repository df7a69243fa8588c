"""The GPU as the planner sees it: a few figures, each with its origin, and the reader of devices/*.yaml.

`find_device` answers `--gpu NAME`, `generic_device` answers `--gpu-mib N`. No torch, no GPU, and YAML only
where a file is read. The file format is described in `devices/README.md`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from planner._support.strict_yaml import Entry, read_entry
from planner.errors import DataFileError, UsageError
from planner.hardware.context import context_size, typical_context
from planner.program import Target

MIB = 2**20
DEVICES_FOLDER: Path = Path(__file__).with_name("devices")
ENDLESS_BYTES = 2**60  # the "total" of a GPU that never runs out
SMALLEST_TOTAL_MIB = 100
EMULATED = "(emulated)"  # how torch names an emulated GPU, at the end
LARGEST_TOTAL_MIB = 10_000_000


class FigureKind(StrEnum):
    """How much a figure is worth."""

    MEASURED = "measured"  # by this project, on that card
    PUBLISHED = "published"  # printed by the tools of others: nvidia-smi, torch's logs and error messages
    DATASHEET = "datasheet"  # said by the maker
    DERIVED = "derived"  # computed from figures of other cards
    UNVERIFIED = "unverified"  # somebody remembers it
    USER = "user"  # given on the command line


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure and where it comes from; the reports show both."""

    value: int  # bytes
    source: str  # one phrase: "nvidia-smi", "torch 2.10 log", "derived from ...", "--gpu-mib"
    spread: int = 0  # one standard deviation, bytes; 0 where the figure is exact
    kind: FigureKind = FigureKind.UNVERIFIED


class Line(StrEnum):
    """Whom a card is made for; a slice is a part of one (MIG)."""

    CONSUMER = "consumer"
    WORKSTATION = "workstation"
    DATACENTER = "datacenter"
    SLICE = "slice"


@dataclass(frozen=True, slots=True)
class Noted:
    """What the database notes of a card besides its memory, and where that comes from."""

    value: float
    source: str
    kind: FigureKind


@dataclass(frozen=True, slots=True)
class About:
    """What helps to choose a card; of it, the multiprocessors decide the scratch memory of some kernels."""

    line: Line
    multiprocessors: Noted | None = None  # None where no source is known
    memory_type: str = ""  # such as GDDR6X
    bandwidth: Noted | None = None  # GB/s, of 10**9 bytes
    instances: tuple[str, ...] = ()  # of clouds that carry it
    instances_source: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a bound to plan for."""

    name: str
    total: Measured  # what nvidia-smi shows
    usable: Measured  # what torch sees as total memory: less what the driver keeps
    context: Measured  # CUDA context and loaded kernels of a training process, after its third step
    capability: tuple[int, int]  # compute capability; decides kernels and the cuBLAS workspace
    aliases: tuple[str, ...] = ()
    capability_source: str = "assumed"
    about: About | None = None  # None where the card's file says nothing

    @property
    def target(self) -> Target:
        """What decides its kernels; with the multiprocessors of the largest such card where nobody knows."""
        count = None if self.about is None else self.about.multiprocessors
        return Target.for_capability(self.capability, None if count is None else round(count.value))


# A straight line through `total - usable` of the cards in devices/*.yaml, and the deviation around it, as
# benchmarks/fits/generic_device.py prints them.
KEPT_BY_DRIVER_MIB = 398
KEPT_BY_DRIVER_SHARE = 0.0023
KEPT_BY_DRIVER_SPREAD_MIB = 98
GENERIC_CAPABILITY = (8, 6)  # Ampere, for want of knowledge

_TYPICAL = typical_context()
GENERIC_CONTEXT = Measured(
    value=_TYPICAL.mib * MIB,
    source="that of the median card: published contexts (torch >= 2.1) grow with the multiprocessors",
    spread=_TYPICAL.spread_mib * MIB,
    kind=FigureKind.DERIVED,
)


def generic_context(capability: tuple[int, int], about: About | None) -> Measured:
    """The context of a card on which none was measured, by its multiprocessors where they are known."""
    if about is None or about.multiprocessors is None:
        return GENERIC_CONTEXT
    count = round(about.multiprocessors.value)
    size = context_size(capability, count)
    return Measured(
        value=size.mib * MIB,
        source=f"line through published contexts (torch >= 2.1) of 12 GPUs, at {count} multiprocessors",
        spread=size.spread_mib * MIB,
        kind=FigureKind.DERIVED,
    )


def generic_usable(total_bytes: int) -> Measured:
    """What torch sees of a card of which only nvidia-smi's total is known: less 398 MiB and 0.23 %."""
    kept = KEPT_BY_DRIVER_MIB * MIB + round(KEPT_BY_DRIVER_SHARE * total_bytes)
    return Measured(
        value=max(0, total_bytes - kept),
        source=f"total less {KEPT_BY_DRIVER_MIB} MiB and {KEPT_BY_DRIVER_SHARE:.2%}: the known cards' line",
        spread=KEPT_BY_DRIVER_SPREAD_MIB * MIB,
        kind=FigureKind.DERIVED,
    )


def generic_device(total_mib: int) -> Device:
    """A card of which only the total memory is known, in MiB as nvidia-smi shows it.

    Raises UsageError below 100 and above 10,000,000 MiB.
    """
    if not SMALLEST_TOTAL_MIB <= total_mib <= LARGEST_TOTAL_MIB:
        raise UsageError(
            f"a GPU of {total_mib} MiB makes no sense: give its total memory in MiB as nvidia-smi shows it, "
            f"from {SMALLEST_TOTAL_MIB} to {LARGEST_TOTAL_MIB}"
        )
    total_bytes = total_mib * MIB
    return Device(
        name=f"generic GPU of {total_mib} MiB",
        total=Measured(total_bytes, "given by the user", kind=FigureKind.USER),
        usable=generic_usable(total_bytes),
        context=GENERIC_CONTEXT,
        capability=GENERIC_CAPABILITY,
        capability_source="assumed: an Ampere card",
    )


def unlimited_device() -> Device:
    """A GPU that never runs out, with the generic context: for an estimate that names no GPU."""
    endless = Measured(ENDLESS_BYTES, "no GPU given", kind=FigureKind.USER)
    return Device(
        "unlimited", endless, endless, GENERIC_CONTEXT, GENERIC_CAPABILITY, (), "assumed: an Ampere card"
    )


def load_devices(folder: Path = DEVICES_FOLDER) -> tuple[Device, ...]:
    """All cards described by the YAML files of a folder, by total memory and name.

    Raises DataFileError, with file, line and key, for the first thing that is wrong with a file, and where
    two cards answer to one name.
    """
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise DataFileError(f"{folder}: no device file (*.yaml) here")
    devices = [_read_device(path) for path in paths]
    owners: dict[str, Path] = {}
    for path, device in zip(paths, devices, strict=True):
        for name in (device.name, *device.aliases):
            owner = owners.setdefault(card_key(name), path)
            if owner != path:
                raise DataFileError(f"{path}: {name!r} names the card of {owner.name} too; change one")
    return tuple(sorted(devices, key=lambda device: (device.total.value, device.name)))


def find_device(name: str, folder: Path = DEVICES_FOLDER) -> Device:
    """The card with this name or alias; case, punctuation and the maker's brand names do not matter.

    Raises UsageError, naming the nearest cards, where there is none.
    """
    devices = {
        card_key(known): device for device in load_devices(folder) for known in (device.name, *device.aliases)
    }
    wanted = card_key(name)
    if wanted in devices:
        return devices[wanted]
    from difflib import get_close_matches

    near = get_close_matches(wanted, devices, n=6, cutoff=0.4)
    cards = ", ".join(dict.fromkeys(devices[key].name for key in near or devices))
    found = f"the nearest are {cards}" if near else f"known are {cards}"
    raise UsageError(f"unknown GPU {name!r}: {found}; for any other card give --gpu-mib N")


def search_devices(devices: Iterable[Device], words: Sequence[str]) -> tuple[Device, ...]:
    """The cards of which each word begins a word of the name, an alias, the line, the kind of memory or a
    cloud's instance, or is the compute capability; case and punctuation do not matter.
    """
    wanted = [part.lower() for word in words for part in word.split()]
    return tuple(device for device in devices if all(_is_found(word, device) for word in wanted))


def _is_found(word: str, device: Device) -> bool:
    about = device.about
    texts = [device.name, *device.aliases]
    if about is not None:
        texts += [about.line.value, about.memory_type, *about.instances]
    key = "".join(_words(word))
    is_capability = word == ".".join(map(str, device.capability))
    return is_capability or (bool(key) and any(_begins_word(key, text) for text in texts))


def _begins_word(key: str, text: str) -> bool:
    words = _words(text)
    return any("".join(words[index:]).startswith(key) for index in range(len(words)))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def is_emulated(gpu: str) -> bool:
    """Return whether a GPU's name, as torch gives it, is that of an emulated one."""
    return gpu.endswith(EMULATED)


def card_key(name: str) -> str:
    """`NVIDIA GeForce RTX 4090`, `rtx4090` and the emulated one are one card."""
    words = _words(name.removesuffix(EMULATED))
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "quadro"))


def _read_device(path: Path) -> Device:
    known = ("name", "capability", "total", "usable", "context")
    parts = read_entry(path).children(known, ("aliases", *_ABOUT))
    capability, capability_source = _capability(parts["capability"])
    total = _figure(parts["total"])
    if total.value < SMALLEST_TOTAL_MIB * MIB:
        raise parts["total"].broken(f"a GPU has at least {SMALLEST_TOTAL_MIB} MiB")
    usable = generic_usable(total.value) if parts["usable"].says("generic") else _figure(parts["usable"])
    if usable.value > total.value:
        raise parts["usable"].broken("more than the total")
    about = _about(parts) if "line" in parts else None
    is_generic = parts["context"].says("generic")
    return Device(
        name=parts["name"].text(),
        total=total,
        usable=usable,
        context=generic_context(capability, about) if is_generic else _figure(parts["context"]),
        capability=capability,
        aliases=tuple(item.text() for item in parts["aliases"].items()) if "aliases" in parts else (),
        capability_source=capability_source,
        about=about,
    )


_ABOUT = ("line", "multiprocessors", "memory", "instances")
_MOST_NOTED = 1_000_000
_FILE_KINDS = [kind.value for kind in FigureKind if kind is not FigureKind.USER]


def _about(parts: dict[str, Entry]) -> About:
    memory = (
        parts["memory"].children(("type", "gb_per_second", "kind", "source")) if "memory" in parts else {}
    )
    names = parts["instances"].children(("names", "kind", "source")) if "instances" in parts else {}
    processors = parts["multiprocessors"].children(("count", "kind", "source")) if _ABOUT[1] in parts else {}
    return About(
        line=Line(parts["line"].choice([line.value for line in Line])),
        multiprocessors=_noted(processors, "count") if processors else None,
        memory_type=memory["type"].text() if memory else "",
        bandwidth=_noted(memory, "gb_per_second") if memory else None,
        instances=tuple(item.text() for item in names["names"].items()) if names else (),
        instances_source=names["source"].text() if names else "",
    )


def _noted(parts: dict[str, Entry], value: str) -> Noted:
    kind = FigureKind(parts["kind"].choice(_FILE_KINDS))
    return Noted(parts[value].number(1, _MOST_NOTED), parts["source"].text(), kind)


def _figure(entry: Entry) -> Measured:
    parts = entry.children(("mib", "kind", "source"), ("spread_mib",))
    return Measured(
        value=round(parts["mib"].number(0, LARGEST_TOTAL_MIB) * MIB),
        source=parts["source"].text(),
        spread=round(parts["spread_mib"].number(0, LARGEST_TOTAL_MIB) * MIB) if "spread_mib" in parts else 0,
        kind=FigureKind(parts["kind"].choice(_FILE_KINDS)),
    )


def _capability(entry: Entry) -> tuple[tuple[int, int], str]:
    parts = entry.children(("version", "source"))
    numbers = [item.number(0, 99) for item in parts["version"].items()]
    if len(numbers) != 2 or any(number != int(number) for number in numbers):
        raise parts["version"].broken("two whole numbers are wanted, such as [8, 6]")
    return (int(numbers[0]), int(numbers[1])), parts["source"].text()
