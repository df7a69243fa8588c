"""The card of this machine, by what the driver says: `--gpu auto`."""

from importlib import import_module
from pathlib import Path
from typing import Any

from planner.errors import NoGpuError
from planner.hardware.database import DEVICES_FOLDER, device_key, load_devices
from planner.hardware.device import GENERIC_CONTEXT, Device, FigureKind, SourcedBytes, generic_usable

SAME_MEMORY = 0.05  # a card of the database is this one if its total agrees within this share


def local_device(folder: Path = DEVICES_FOLDER, nvml: Any = None) -> Device:
    """The first GPU of this machine as the database knows it, else by what NVML says and the known cards'
    line for the rest. `nvml` is the module `pynvml`, or one like it.

    Raises NoGpuError where there is no GPU, no driver, or no nvidia-ml-py.
    """
    try:
        library = nvml or import_module("pynvml")
        library.nvmlInit()
    except Exception as error:  # NVML's own errors have no base that is known without it
        raise NoGpuError(_message(error)) from error
    try:
        handle = library.nvmlDeviceGetHandleByIndex(0)
        name = library.nvmlDeviceGetName(handle)
        total_bytes = int(library.nvmlDeviceGetMemoryInfo(handle).total)
        major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
    except Exception as error:
        raise NoGpuError(_message(error)) from error
    finally:
        library.nvmlShutdown()
    name = name.decode() if isinstance(name, bytes) else str(name)
    known = [
        card
        for card in load_devices(folder)
        if device_key(name) in map(device_key, (card.name, *card.aliases))
        and abs(card.total.value - total_bytes) <= SAME_MEMORY * total_bytes
    ]
    return known[0] if known else _unknown(name, total_bytes, (int(major), int(minor)))


def _unknown(name: str, total_bytes: int, capability: tuple[int, int]) -> Device:
    return Device(
        name=name,
        total=SourcedBytes(total_bytes, "NVML on this machine", kind=FigureKind.MEASURED),
        usable=generic_usable(total_bytes),
        context=GENERIC_CONTEXT,
        capability=capability,
        capability_source="NVML on this machine",
    )


def _message(error: Exception) -> str:
    what = "nvidia-ml-py is missing" if isinstance(error, ImportError) else " ".join(str(error).split())
    return f"--gpu auto: no NVIDIA GPU here ({what}); give --gpu NAME or --gpu-mib N"
