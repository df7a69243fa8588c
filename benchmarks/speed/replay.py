"""Time a replay against the allocator alone: ResNet-50 at batch 128, about 3,500 events.

    python -m benchmarks.speed.replay [MODEL ...]

Prints medians of 20 in milliseconds; a replay of ResNet-50 may take 50. What the replay adds to the
allocator is reading the events. Saving and loading the trace as a file stands beside it.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.replay import replay_trace
from planner.capture.session import record
from planner.jobs import Job, TensorSpec
from planner.program.events import Alloc, Free, Trace
from planner.program.extrapolation.fit import fit_traces
from planner.store.codec import load_programs, save_programs

BATCH = 128
AMPERE = (8, 6)
REPEATS = 20


def milliseconds(action: Callable[[], object]) -> float:
    """Return the median wall time of an action."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return 1e3 * median(times)


def run_allocator(requests: list[tuple[int, int]]) -> None:
    """The calls of a replay, prepared: (block, bytes) allocates, (block, 0) frees."""
    allocator = CachingAllocator()
    blocks: dict[int, Block | None] = {}
    for name, size_bytes in requests:
        if size_bytes:
            blocks[name] = allocator.malloc(size_bytes)
        else:
            block = blocks.pop(name)
            assert block is not None
            allocator.free(block)


def requests_of(trace: Trace) -> list[tuple[int, int]]:
    """Return a trace's requests to the allocator at `BATCH`."""
    requests = []
    for event in trace.events:
        if isinstance(event, Alloc):
            requests.append((event.block, event.size_bytes))
        elif isinstance(event, Free):
            requests.append((event.block, 0))
    return requests


def report(model: str) -> str:
    """Return one line on one model of torchvision."""
    image, classes = TensorSpec((3, 224, 224)), TensorSpec((), "int64")
    job = Job.create(f"torchvision:{model}", inputs=(image,), target=classes)
    program = fit_traces(record(job, 2, AMPERE), record(job, 3, AMPERE))
    trace = program.instantiate(BATCH)
    requests = requests_of(trace)
    replaying = milliseconds(lambda: replay_trace(trace))
    allocating = milliseconds(lambda: run_allocator(requests))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.trace"
        saving = milliseconds(lambda: save_programs([program], path, {}))
        loading = milliseconds(lambda: load_programs(path))
        size_bytes = path.stat().st_size
    return (
        f"{model:16} {len(trace.events):6} events: replay {replaying:.1f} ms, allocator alone "
        f"{allocating:.1f} ms; file of {size_bytes} bytes, saved in {saving:.1f} ms, "
        f"loaded in {loading:.1f} ms"
    )


def main() -> None:
    """Print one line per model."""
    for model in sys.argv[1:] or ["resnet50"]:
        print(report(model))


if __name__ == "__main__":
    main()
