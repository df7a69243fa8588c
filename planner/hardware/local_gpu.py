"""Describe the GPU of this machine as a `Device`.

The device serves `--gpu auto` and runs that were measured here.
"""

from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from planner.errors import NoGpuError, UsageError
from planner.hardware.calibration.lookup import is_same_gpu
from planner.hardware.calibration.model import Versions
from planner.hardware.database import DEVICES_FOLDER, find_device, load_devices
from planner.hardware.device import GENERIC_CONTEXT, Device, FigureKind, SourcedBytes, generic_usable


def local_device(folder: Path = DEVICES_FOLDER, nvml: Any = None) -> Device:
    """Return this machine's first GPU as pynvml finds it, with the database's figures if it has the GPU.

    Raises NoGpuError without a GPU, a driver or nvidia-ml-py.
    """
    try:
        library = nvml or import_module("pynvml")
        library.nvmlInit()
        with ExitStack() as at_end:
            at_end.callback(library.nvmlShutdown)
            handle = library.nvmlDeviceGetHandleByIndex(0)
            name = library.nvmlDeviceGetName(handle)
            total_bytes = int(library.nvmlDeviceGetMemoryInfo(handle).total)
            major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
    except Exception as error:  # the base class of NVML's errors is unknown without the library
        problem = (
            "nvidia-ml-py is missing" if isinstance(error, ImportError) else " ".join(str(error).split())
        )
        what_to_do = "give --gpu NAME or --gpu-mib N"
        raise NoGpuError(f"--gpu auto: no NVIDIA GPU here ({problem}); {what_to_do}") from error
    name = name.decode() if isinstance(name, bytes) else str(name)
    versions = Versions("unknown", None, None, None, (int(major), int(minor)), None, total_bytes)
    return detected_device(name, versions, folder)


def detected_device(gpu: str, versions: Versions, folder: Path = DEVICES_FOLDER) -> Device:
    """Return a detected GPU from the database, or else a device made of the figures in `versions`.

    Raises UsageError if no memory size is known.
    """
    devices = [device for device in load_devices(folder) if is_same_gpu(device, gpu, versions)]
    if devices:
        return devices[0]
    total_bytes, usable_bytes = versions.nvml_total_bytes, versions.torch_total_bytes
    if total_bytes is None and usable_bytes is None:
        raise UsageError(f"{gpu}: its memory is not known; give --gpu-mib N as nvidia-smi shows it")
    by_nvml, by_torch = "NVML on this machine", "torch on this machine"
    source = by_nvml if usable_bytes is None else by_torch
    seen_by = by_torch if total_bytes is None else by_nvml
    total = SourcedBytes(total_bytes or usable_bytes or 0, seen_by, kind=FigureKind.MEASURED)
    usable = generic_usable(total.value)
    if usable_bytes is not None:
        usable = SourcedBytes(usable_bytes, source, kind=FigureKind.MEASURED)
    return Device(gpu, total, usable, GENERIC_CONTEXT, versions.capability, capability_source=source)


def check_detected(named: str, gpu: str, versions: Versions) -> Device:
    """Return the GPU that `--gpu` names, after checking that a process found the same GPU.

    Raises UsageError if the process found a different GPU.
    """
    device = find_device(named)
    if not is_same_gpu(device, gpu, versions):
        raise UsageError(f"--gpu {named}: this machine has {gpu}; remove --gpu")
    return device
