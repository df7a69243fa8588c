"""Describe a GPU of the database to the stand-in libraries."""

from planner.device import Device
from planner.errors import UsageError

# Shared memory of an SM and the most that a block may opt into (KiB), threads and blocks of an SM, by compute
# capability: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_LIMITS: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (7, 0): (96, 96, 2048, 32),
    (7, 5): (64, 64, 1024, 16),
    (8, 0): (164, 163, 2048, 32),
    (8, 6): (100, 99, 1536, 16),
    (8, 7): (164, 163, 1536, 16),
    (8, 9): (100, 99, 1536, 24),
    (9, 0): (228, 227, 2048, 32),
    (10, 0): (228, 227, 2048, 32),
    (10, 3): (228, 227, 2048, 32),
    (12, 0): (100, 99, 1536, 24),
    (12, 1): (100, 99, 1536, 24),
}
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
    if device.capability not in _LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in _LIMITS)
        raise UsageError(
            f"{device.name}: compute capability {'.'.join(map(str, device.capability))} is not emulated; "
            f"known are {known}"
        )
    shared_per_sm, shared_per_block, threads, blocks = _LIMITS[device.capability]
    major, minor = device.capability
    fields: dict[str, str | int] = {
        "name": f"NVIDIA {device.name.replace(';', ',')} (emulated)",
        "count": count,
        "major": major,
        "minor": minor,
        "sm_count": device.chip.multiprocessors,
        "total_bytes": device.total.value,
        "usable_bytes": device.usable.value,
        "context_bytes": device.context.value if context_bytes is None else context_bytes,
        "threads_per_sm": threads,
        "blocks_per_sm": blocks,
        "shared_per_block": shared_per_block * 1024,
        "shared_per_sm": shared_per_sm * 1024,
        "shared_reserved": 1024 if major >= 8 else 0,
        "l2_bytes": _L2_BYTES,
        "clock_khz": _CLOCK_KHZ,
        "memory_clock_khz": _MEMORY_CLOCK_KHZ,
        "bus_bits": _BUS_BITS,
        "ecc": 0,
    }
    return ";".join(f"{key}={value}" for key, value in fields.items())
