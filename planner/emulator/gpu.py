"""Describe a GPU of the database to the stand-in libraries."""

import json

from planner.errors import UsageError
from planner.hardware import EMULATED, Device, Vendor
from planner.hardware.cudnn import describe_for_cudnn
from planner.program import SM_LIMITS

MAX_COUNT = 64


def describe_gpu(device: Device, count: int = 1, context_bytes: int | None = None) -> str:
    """Return the value of PLANNER_EMULATED_GPU, `KEY=VALUE` pairs joined by semicolons, for `count` GPUs.

    `context_bytes` is by default the device's. Raises UsageError for a GPU that is not NVIDIA's, a compute
    capability whose limits are not known, and a count out of range.
    """
    if not 1 <= count <= MAX_COUNT:
        raise UsageError(f"--gpus {count}: give a number from 1 to {MAX_COUNT}")
    if device.vendor is not Vendor.NVIDIA:
        raise UsageError(f"{device.name}: only GPUs of NVIDIA are emulated")
    if device.capability not in SM_LIMITS:
        versions = ", ".join(f"{major}.{minor}" for major, minor in SM_LIMITS)
        raise UsageError(
            f"{device.name}: compute capability {'.'.join(map(str, device.capability))} is not emulated; "
            f"known are {versions}"
        )
    shared_per_block, threads, blocks = SM_LIMITS[device.capability]
    major, minor = device.capability
    shared_reserved = 1024 if major >= 8 else 0  # bytes of an SM's shared memory reserved for each block
    described = describe_for_cudnn(device.capability, device.target.sm_count)
    fields: dict[str, str | int] = {
        "name": f"NVIDIA {device.name.replace(';', ',')} {EMULATED}",
        "count": count,
        "major": major,
        "minor": minor,
        "sm_count": device.target.sm_count,
        "total_bytes": device.total.value,
        "usable_bytes": device.usable.value,
        "context_bytes": device.context.value if context_bytes is None else context_bytes,
        "threads_per_sm": threads,
        "blocks_per_sm": blocks,
        "shared_per_block": shared_per_block,
        "shared_per_sm": shared_per_block + shared_reserved,
        "shared_reserved": shared_reserved,
        "l2_bytes": described["l2CacheSize"],
        "clock_khz": described["smClockRateKHz"],
        "memory_clock_khz": described["memClockRateKHz"],
        "bus_bits": described["memoryBusWidth"],
        "ecc": 0,
        "cudnn": json.dumps(described),
    }
    return ";".join(f"{key}={value}" for key, value in fields.items())
