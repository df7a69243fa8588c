"""The recorded history of the allocator of a real or an emulated GPU, event by event.

`torch.cuda.memory._record_memory_history` records blocks allocated and freed, and segments taken from CUDA
and returned to it, each with its address and size. `check` replays such a history.

Actions are named as in torch (c10/cuda/CUDACachingAllocator.h, `TraceEntry`): `alloc` with the requested
size, `free_requested` and `free_completed` with the block's address, `segment_alloc` and the other segment
actions, and `oom` with the rounded size.
"""

from typing import NamedTuple

from msgspec import Struct

from planner.allocator.blocks import SegmentState
from planner.program import Category, Phase, Site

# The sign by which each action on segments changes the reserved memory.
SEGMENT_SIGNS = {"segment_alloc": 1, "segment_free": -1, "segment_map": 1, "segment_unmap": -1}
ACTIONS = ("alloc", "free_requested", "free_completed", *SEGMENT_SIGNS, "oom", "snapshot")
MOST_EVENTS = 400_000  # three steps of a ResNet-50 have 20,000


class HistoryEvent(NamedTuple):
    """One recorded action of torch's allocator, such as an allocation, a free or a refused request."""

    action: str  # one of `ACTIONS`
    address: int  # of an `oom` the free bytes of the GPU, 0 if not recorded
    size_bytes: int  # of an `alloc` the requested bytes
    site: int = -1  # index into the sites of the history; -1 if unknown
    stream: int = 0  # arbitrary number; 0 is the default stream


class HistoryMark(NamedTuple):
    """The start of a phase of the training loop, as a position in a history."""

    allocations: int  # number of `alloc` events before the phase
    step: int
    phase: Phase


class History(Struct, frozen=True):
    """The recorded events of one GPU's allocator, starting at an arbitrary moment of its process."""

    gpu: str
    torch: str  # version
    alloc_conf: str  # the text of PYTORCH_ALLOC_CONF
    total_bytes: int | None  # the GPU's memory as torch sees it
    limit_bytes: int | None  # set by `set_per_process_memory_fraction`; None if not known to be set
    events: tuple[HistoryEvent, ...]
    marks: tuple[HistoryMark, ...] = ()
    sites: tuple[Site, ...] = ()  # the allocating code: FILE:LINE of the user's code, function
    notes: tuple[str, ...] = ()  # peculiarities of the record
    start: tuple[SegmentState, ...] = ()  # reserved memory before the first event, by address
    categories: tuple[Category | None, ...] = ()  # by site, derived from the stack; () if not recorded
