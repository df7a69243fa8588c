"""Find the GPUs with the least memory on which recorded requests are served."""

from msgspec.structs import replace

from planner.allocator import AllocatorConfig, MemoryLimits, Replay, replay_trace
from planner.hardware import EVEN_ODDS, Device, load_devices, make_budget, mig_slice
from planner.planning.diagnosis.diagnosis import GpusServing
from planner.program import Outcome, Trace


def gpus_serving(trace: Trace, config: AllocatorConfig) -> GpusServing | None:
    """Return the smallest GPUs that serve all requests of a trace, or None if no GPU does.

    They are the known GPUs with the least memory. Slices of GPUs (MIG) are left out. Each GPU has the memory
    that its context and its driver are expected to leave; a bound on the share of a GPU's memory
    (`per_process_memory_fraction`) is not applied. The GPUs are searched by bisection, as if more memory
    always served more requests.
    """
    config = replace(config, per_process_memory_fraction=1.0)
    whole = (device for device in load_devices() if mig_slice(device) is None)
    gpus = sorted(((_limits(device, config), device) for device in whole), key=_by_memory)
    runs: dict[int, Replay] = {}
    low, high = -1, len(gpus)  # GPU `low` does not serve the requests, GPU `high` does
    while high - low > 1:
        middle = (low + high) // 2
        runs[middle] = replay_trace(trace, gpus[middle][0])
        if runs[middle].outcome is Outcome.DOES_NOT_FIT:
            low = middle
        else:
            high = middle
    if high == len(gpus):
        return None
    first = gpus[high][1]
    names = tuple(device.name for _, device in gpus[high:] if _gib(device) == _gib(first))
    too_small = gpus[low][1].name if low >= 0 else None
    run = runs[high]
    return GpusServing(first.total.value, names, run.peak_reserved_bytes, run.retries, too_small)


def _gib(device: Device) -> int:
    return round(device.total.value / 2**30)


def _limits(device: Device, config: AllocatorConfig) -> MemoryLimits:
    return make_budget(device, EVEN_ODDS, config).limits


def _by_memory(gpu: tuple[MemoryLimits, Device]) -> tuple[int, str]:
    return gpu[0].allocator_limit_bytes or 0, gpu[1].name
