"""Read the names that schedulers give to GPUs, from devices/names/*.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from planner._support.conversion import Text
from planner._support.strict_yaml import read_entry
from planner.hardware.database import DEVICES_FOLDER
from planner.hardware.device import Device, FigureKind

Vocabulary = Literal["nvml", "ray", "skypilot"]

_MIG = " MIG "  # in the names of slices, between the GPU and the profile


class _NamesRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The names of GPUs from one source."""

    source: Text
    kind: FigureKind
    names: dict[Text, tuple[Text, ...]]


class MigSlice(NamedTuple):
    """The whole GPU and the profile of a MIG slice."""

    gpu: str  # name of the whole GPU in the database
    profile: str  # such as 3g.40gb


def load_names(vocabulary: Vocabulary, folder: Path = DEVICES_FOLDER) -> Mapping[str, tuple[str, ...]]:
    """Read the names of GPUs in a scheduler's vocabulary, keyed by the GPU's name in the database.

    Raises DataFileError.
    """
    names: dict[str, tuple[str, ...]] = {}
    for entry in read_entry(folder / "names" / f"{vocabulary}.yaml").items():
        for gpu, given in entry.convert(_NamesRecord).names.items():
            names[gpu] = (*names.get(gpu, ()), *given)
    return names


def known_names(device: Device, names: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names in `names` of a GPU, or of the whole GPU for a MIG slice, or () if there are none."""
    part = mig_slice(device)
    return names.get(device.name if part is None else part.gpu, ())


def mig_slice(device: Device) -> MigSlice | None:
    """Return the GPU and profile of a MIG slice, or None for a whole GPU."""
    gpu, is_slice, profile = device.name.partition(_MIG)
    return MigSlice(gpu, profile) if is_slice else None
