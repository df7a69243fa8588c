"""Read this process's GPU memory from NVML, and GPU properties from torch."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calibration.probe.client import DetectedGpu
from planner._support.versions import format_cudnn_version
from planner.hardware.calibration import Settings, Versions


@dataclass(frozen=True, slots=True)
class Gauge:
    """Reader of this process's memory on a GPU, by NVML."""

    level: Callable[[], int]  # reads the bytes of the process
    total_bytes: int
    driver: str
    remark: str  # not empty if the level is not of the process alone


def open_gauge(index: int = 0) -> Gauge | None:
    """Return a gauge of torch's GPU `index` and create the context there, or return None without NVML.

    Call this before the process has a context on the GPU. If the process has its context already, only a
    gauge without a remark reads correctly.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = nvml_handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES", ""), index)
        before = pynvml.nvmlDeviceGetMemoryInfo(handle)
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # no library, no driver, no permission: in any case there is nothing to read
        return None
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(index)  # a process without a context is never shown
    driver = driver.decode() if isinstance(driver, bytes) else str(driver)
    if own_bytes(pynvml, handle) is not None:
        return Gauge(lambda: own_bytes(pynvml, handle) or 0, int(before.total), driver, "")
    remark = "process memory: the device's used memory less its level before"

    def rise() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used - before.used)

    return Gauge(rise, int(before.total), driver, remark)


def nvml_handle(pynvml: Any, visible: str, index: int = 0) -> Any:
    """Return the NVML handle of torch's GPU `index`. `visible` is the value of CUDA_VISIBLE_DEVICES."""
    name = visible.split(",")[index].strip() if visible else str(index)
    if not name or name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name or 0))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def own_bytes(pynvml: Any, handle: Any) -> int | None:
    """Return this process's GPU memory in bytes, or None if NVML does not show it."""
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    return None


def detect_gpu(gauge: Gauge | None, index: int = 0) -> DetectedGpu:
    """Return torch's GPU `index` by name, with software versions, memory sizes and TF32 settings.

    They are the versions and settings of this process.
    """
    import torch

    properties = torch.cuda.get_device_properties(index)
    versions = Versions(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=format_cudnn_version(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        driver=gauge.driver if gauge else None,
        capability=(properties.major, properties.minor),
        torch_total_bytes=properties.total_memory,
        nvml_total_bytes=gauge.total_bytes if gauge else None,
    )
    settings = Settings(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return DetectedGpu(torch.cuda.get_device_name(index), versions, settings)


def allocator_settings() -> str:
    """Return PYTORCH_ALLOC_CONF or else PYTORCH_CUDA_ALLOC_CONF of this process, or "" if unset."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
