"""Time the allocator simulator on a synthetic training history; prints microseconds per event.

    python -m benchmarks.speed.allocator

The history has the shape of three training steps: parameters that stay, activations that die in reverse,
gradients, and temporaries that come and go with each operation.
"""

import random
import time

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MIB, AllocatorConfig, MemoryLimits, parse_alloc_conf

STEPS = 3
LAYERS = 300
REPEATS = 20

Event = tuple[int, int]  # (block, bytes) allocates, (block, 0) frees


def training_history(seed: int) -> list[Event]:
    """Return three steps of a made-up network: about 6,000 events."""
    rng = random.Random(seed)
    events: list[Event] = []
    names = iter(range(10**9))

    def allocate(size_bytes: int) -> int:
        name = next(names)
        events.append((name, size_bytes))
        return name

    def free(name: int) -> None:
        events.append((name, 0))

    parameter_bytes = [int(2 ** rng.uniform(8, 24)) for _ in range(LAYERS)]
    activation_bytes = [int(2 ** rng.uniform(16, 27)) for _ in range(LAYERS)]
    for size_bytes in parameter_bytes:
        allocate(size_bytes)
    for _ in range(STEPS):
        alive = []
        for size_bytes in activation_bytes:
            workspace = allocate(rng.randrange(1, 8 * MIB))
            alive.append(allocate(size_bytes))
            free(workspace)
        gradients = []
        for size_bytes, own_bytes in zip(reversed(activation_bytes), reversed(parameter_bytes), strict=True):
            temporary = allocate(size_bytes)
            gradients.append(allocate(own_bytes))
            free(alive.pop())
            free(temporary)
        for gradient in gradients:
            free(gradient)
    return events


def replay(events: list[Event], config: AllocatorConfig, capacity_bytes: int | None) -> CachingAllocator:
    """Run a history without the blocks that do not fit."""
    allocator = CachingAllocator(MemoryLimits(capacity_bytes, config=config))
    malloc, free = allocator.malloc, allocator.free
    blocks: dict[int, Block | None] = {}
    for name, size_bytes in events:
        if size_bytes:
            blocks[name] = malloc(size_bytes)
            continue
        block = blocks.pop(name)
        if block is not None:
            free(block)
    return allocator


def time_replay(
    events: list[Event], config: AllocatorConfig, capacity_bytes: int | None
) -> tuple[float, CachingAllocator]:
    """Return the seconds of the fastest of several replays, and the result of the last."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        allocator = replay(events, config, capacity_bytes)
        seconds.append(time.perf_counter() - start)
    return min(seconds), allocator


def main() -> None:
    """Print one line per configuration."""
    events = training_history(seed=1)
    print(f"{len(events)} events, best of {REPEATS}")
    for conf in ("", "expandable_segments:True", "roundup_power2_divisions:8", "max_split_size_mb:64"):
        config = parse_alloc_conf(conf)
        free_peak_bytes = replay(events, config, None).peak_reserved_bytes
        for capacity_bytes in (None, int(free_peak_bytes * 0.95)):
            best, allocator = time_replay(events, config, capacity_bytes)
            title = (conf or "defaults") + ("" if capacity_bytes is None else ", capacity 5 % short")
            print(
                f"{title:48} {best * 1e6 / len(events):5.2f} us/event {best * 1e3:6.2f} ms  "
                f"reserved {allocator.peak_reserved_bytes / MIB:7.1f} MiB  "
                f"retries {allocator.retries:2}  ooms {allocator.ooms:2}"
            )


if __name__ == "__main__":
    main()
