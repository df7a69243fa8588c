"""Describe a GPU of the database to the stand-in libraries."""

from planner.cudnn import LIMITS
from planner.device import Device
from planner.errors import UsageError

EMULATED = "(emulated)"  # how the name of an emulated GPU ends
MAX_COUNT = 64

# Figures of an H100 SXM: no memory depends on them as far as is known, but for a few answers of cuDNN on 9.0.
_L2_BYTES, _CLOCK_KHZ, _MEMORY_CLOCK_KHZ, _BUS_BITS = 50 * 2**20, 1_980_000, 2_619_000, 5120


def describe_gpu(device: Device, count: int = 1, context_bytes: int | None = None) -> str:
    """Return the value of PLANNER_EMULATED_GPU: `KEY=VALUE` joined by semicolons.

    `count` GPUs of this kind are visible. `context_bytes` is by default the device's own. Raises UsageError
    for a compute capability whose limits are not known, and for a count that is out of range.
    """
    if not 1 <= count <= MAX_COUNT:
        raise UsageError(f"--gpus {count}: give a number from 1 to {MAX_COUNT}")
    if device.capability not in LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in LIMITS)
        raise UsageError(
            f"{device.name}: compute capability {'.'.join(map(str, device.capability))} is not emulated; "
            f"known are {known}"
        )
    shared_per_block, threads, blocks = LIMITS[device.capability]
    major, minor = device.capability
    shared_reserved = 1024 if major >= 8 else 0  # of an SM's shared memory, for each block
    fields: dict[str, str | int] = {
        "name": f"NVIDIA {device.name.replace(';', ',')} {EMULATED}",
        "count": count,
        "major": major,
        "minor": minor,
        "sm_count": device.chip.multiprocessors,
        "total_bytes": device.total.value,
        "usable_bytes": device.usable.value,
        "context_bytes": device.context.value if context_bytes is None else context_bytes,
        "threads_per_sm": threads,
        "blocks_per_sm": blocks,
        "shared_per_block": shared_per_block,
        "shared_per_sm": shared_per_block + shared_reserved,
        "shared_reserved": shared_reserved,
        "l2_bytes": _L2_BYTES,
        "clock_khz": _CLOCK_KHZ,
        "memory_clock_khz": _MEMORY_CLOCK_KHZ,
        "bus_bits": _BUS_BITS,
        "ecc": 0,
    }
    return ";".join(f"{key}={value}" for key, value in fields.items())
