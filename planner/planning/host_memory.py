"""Compute the host memory that a training process takes for tensors."""

from msgspec import Struct

from planner.jobs import Job
from planner.planning.phases import has_plain_weights, saved_blocks, setup_events, trains
from planner.program import Alloc, Category, Phase, PhaseStart, Trace, pinned_bytes


class HostMemory(Struct, frozen=True):
    """The bytes of host memory that a process's tensors take, by purpose.

    A number is None if it is unknown, or if the process does not need the memory.

    Python, the libraries and the data itself are not counted.
    """

    weights_bytes: int | None  # of a model made on the CPU, until it is moved to the GPU
    batch_bytes: int  # of each batch that a loader holds, by default two of each worker (torch/utils/data)
    checkpoint_bytes: int | None  # loaded onto the CPU: weights, buffers and optimizer state
    saving_bytes: int | None  # of the largest tensor, since `torch.save` copies one by one
    pinned_bytes: int


def count_host_memory(job: Job, trace: Trace) -> HostMemory:
    """Compute the host memory of a job's process from the job's trace.

    For shards and quantized weights, which libraries build in other ways, only batches and pinned memory are
    counted. If the job does not train, the bytes of checkpoints and of saving are None.
    """
    pinned, batch = pinned_bytes(trace.pinned), _batch_bytes(trace)
    if not has_plain_weights(job):
        return HostMemory(None, batch, None, None, pinned)
    saved = saved_blocks(trace)
    weights = sum(block.size_bytes for block in saved if block.category is Category.PARAMETER)
    if not trains(job):
        return HostMemory(weights, batch, None, None, pinned)
    sizes = [block.size_bytes for block in saved]
    return HostMemory(weights, batch, sum(sizes), max(sizes, default=0), pinned)


def _batch_bytes(trace: Trace) -> int:
    """Return the bytes of the inputs of the first batch of a trace.

    The inputs of the first batch are allocated between the set-up and the second batch.
    """
    batches = size_bytes = 0
    for event in trace.events[len(setup_events(trace)) :]:
        if isinstance(event, PhaseStart):
            batches += event.phase is Phase.INPUTS
            if batches > 1:
                break
        elif isinstance(event, Alloc) and event.category is Category.INPUT:
            size_bytes += event.size_bytes
    return size_bytes
