"""Read the device database: GPUs by name, from devices/*.yaml (devices/README.md describes the format)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from planner._support.conversion import Text
from planner._support.strict_yaml import read_entry
from planner.errors import DataFileError, UsageError
from planner.hardware.device import (
    LARGEST_TOTAL_MIB,
    MIB,
    SMALLEST_TOTAL_MIB,
    Device,
    FigureKind,
    ProductInfo,
    ProductLine,
    SourcedBytes,
    SourcedValue,
    Vendor,
    generic_context,
    generic_usable,
)
from planner.hardware.vendors import refuse_apple

DEVICES_FOLDER = Path(__file__).with_name("devices")
OTHER_FOLDER = DEVICES_FOLDER / "other"  # GPUs of other makers than NVIDIA
_MOST_SUGGESTED = 6  # largest number of names that are suggested for an unknown name
EMULATED = "(emulated)"  # the end of torch's name for an emulated GPU

_Mib = Annotated[float, Meta(ge=0, le=LARGEST_TOTAL_MIB)]
_Number = Annotated[float, Meta(ge=1, le=1_000_000)]
_Kind = Literal["measured", "published", "datasheet", "derived", "unverified"]
_Version = Annotated[int, Meta(ge=0, le=99)]


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the records in a device file. Records refuse unknown keys."""


class _Figure(_Record, frozen=True, kw_only=True):
    kind: _Kind
    source: Text


class _Size(_Record, frozen=True):
    mib: _Mib
    kind: _Kind
    source: Text
    spread_mib: _Mib = 0.0

    def sourced(self) -> SourcedBytes:
        kind = FigureKind(self.kind)
        return SourcedBytes(round(self.mib * MIB), self.source, round(self.spread_mib * MIB), kind)


class _Capability(_Record, frozen=True):
    version: tuple[_Version, _Version]
    source: Text


class _Multiprocessors(_Figure, frozen=True):
    count: _Number


class _Memory(_Figure, frozen=True):
    type: Text
    gb_per_second: _Number


class _Instances(_Figure, frozen=True):
    names: tuple[Text, ...]


class _DeviceFile(_Record, frozen=True):
    name: Text
    capability: _Capability
    total: _Size
    usable: _Size | Literal["generic"]
    context: _Size | Literal["generic"]
    aliases: tuple[Text, ...] = ()
    vendor: Vendor = Vendor.NVIDIA
    line: ProductLine | None = None
    multiprocessors: _Multiprocessors | None = None
    memory: _Memory | None = None
    instances: _Instances | None = None


def load_devices(folder: Path = DEVICES_FOLDER) -> tuple[Device, ...]:
    """Read the GPUs from the device files in a folder, sorted by memory and name.

    Raises DataFileError if the folder has no device file, a file is invalid, or two GPUs share a name.
    """
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise DataFileError(f"{folder}: no device file (*.yaml) here")
    devices = [_read_device(path) for path in paths]
    owners: dict[str, Path] = {}
    for path, device in zip(paths, devices, strict=True):
        for name in (device.name, *device.aliases):
            owner = owners.setdefault(device_key(name), path)
            if owner != path:
                raise DataFileError(f"{path}: {name!r} names the GPU of {owner.name} too; change one")
    return tuple(sorted(devices, key=lambda device: (device.total.value, device.name)))


def load_other_devices() -> tuple[Device, ...]:
    """Read the GPUs of makers other than NVIDIA. Raises DataFileError. Less is modelled for these GPUs."""
    return load_devices(OTHER_FOLDER)


def find_device(name: str, folder: Path = DEVICES_FOLDER) -> Device:
    """Return the GPU whose name or alias has the same `device_key` as `name`.

    Raises UsageError for an unknown name, with the nearest names, and for a GPU of Apple.
    """
    others = load_other_devices() if folder == DEVICES_FOLDER else ()
    devices = {
        device_key(alias): device
        for device in (*load_devices(folder), *others)
        for alias in (device.name, *device.aliases)
    }
    key = device_key(name)
    if key in devices:
        return devices[key]
    refuse_apple(key)
    raise UsageError(f"unknown GPU {name!r}: {_hint(name, devices)}; for any other GPU give --gpu-mib N")


def _hint(name: str, devices: Mapping[str, Device]) -> str:
    """Return a hint for an unknown GPU name: matching or similar names, or a command that lists GPUs."""
    from difflib import get_close_matches

    key = device_key(name)
    known = dict.fromkeys(device.name for device in devices.values() if " MIG " not in device.name)
    matching = {device.name for device in search_devices(devices.values(), [key])} if key else set()
    found = [one for one in known if one in matching]
    if len(found) > _MOST_SUGGESTED:
        return f"{len(found)} GPUs match; `planner devices {name.strip()}` lists them"
    if not found:
        near = get_close_matches(key, devices, n=_MOST_SUGGESTED, cutoff=0.4)
        begins = (own for own in devices if key.startswith(own))
        found = list(dict.fromkeys(devices[one].name for one in (*begins, *near)))
    return f"the nearest are {', '.join(found)}" if found else "`planner devices` lists all that are known"


def search_devices(devices: Iterable[Device], words: Sequence[str]) -> tuple[Device, ...]:
    """Return the GPUs that match all words, ignoring case and punctuation.

    A word matches if it is the compute capability or begins a word of the name, an alias, the maker, the
    product line, the type of memory or a cloud's instance.
    """
    terms = [part.lower() for word in words for part in word.split()]
    return tuple(device for device in devices if all(_matches(term, device) for term in terms))


def device_key(name: str) -> str:
    """Return a GPU's name in a normal form, in which names are compared.

    It is in lower case without spaces, punctuation, brands and "(emulated)".

    >>> device_key("NVIDIA GeForce RTX 4090"), device_key("rtx4090 (emulated)")
    ('rtx4090', 'rtx4090')
    """
    words = _words(name.removesuffix(EMULATED))
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "quadro"))


def is_emulated(gpu: str) -> bool:
    """Return whether torch's name of a GPU says that the GPU is emulated."""
    return gpu.endswith(EMULATED)


def search_words(devices: Iterable[Device]) -> frozenset[str]:
    """Return the words of `devices` that `search_devices` compares with, in lower case."""
    return frozenset(word for device in devices for text in _texts(device) for word in _words(text))


def _matches(term: str, device: Device) -> bool:
    key = "".join(_words(term))
    is_capability = device.vendor is Vendor.NVIDIA and term == ".".join(map(str, device.capability))
    texts = map(_words, _texts(device))
    ends = ("".join(words[index:]) for words in texts for index in range(len(words)))
    return is_capability or (bool(key) and any(end.startswith(key) for end in ends))


def _texts(device: Device) -> list[str]:
    """Return the texts that describe a GPU: its name, aliases, maker, product line, memory and instances."""
    about, texts = device.about, [device.name, device.vendor.value, *device.aliases]
    return texts if about is None else [*texts, about.line.value, about.memory_type, *about.instances]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _read_device(path: Path) -> Device:
    entry = read_entry(path)
    record = entry.convert(_DeviceFile)
    total = record.total.sourced()
    if total.value < SMALLEST_TOTAL_MIB * MIB:
        raise entry.mapping()["total"].broken(f"a GPU has at least {SMALLEST_TOTAL_MIB} MiB")
    usable = generic_usable(total.value) if record.usable == "generic" else record.usable.sourced()
    if usable.value > total.value:
        raise entry.mapping()["usable"].broken("more than the total")
    about = _product_info(record, record.line) if record.line else None
    capability, context = record.capability, record.context
    figures = generic_context(capability.version, about) if context == "generic" else context.sourced()
    return Device(
        record.name,
        total,
        usable,
        figures,
        capability.version,
        record.aliases,
        capability.source,
        about,
        vendor=record.vendor,
    )


def _product_info(record: _DeviceFile, line: ProductLine) -> ProductInfo:
    count, memory, instances = record.multiprocessors, record.memory, record.instances
    return ProductInfo(
        line=line,
        multiprocessors=_sourced(count.count, count) if count else None,
        memory_type=memory.type if memory else "",
        bandwidth=_sourced(memory.gb_per_second, memory) if memory else None,
        instances=instances.names if instances else (),
        instances_source=instances.source if instances else "",
    )


def _sourced(value: float, record: _Figure) -> SourcedValue:
    return SourcedValue(value, record.source, FigureKind(record.kind))
