"""What an allocator did, event by event: the record of a real GPU's, or of an emulated one.

torch records with `torch.cuda.memory._record_memory_history` blocks allocated and freed, segments that came
from CUDA and went back to it, each with its address and size. `check` replays such a history.

Actions as torch names them (c10/cuda/CUDACachingAllocator.h, `TraceEntry`): `alloc` with the requested size,
`free_requested` and `free_completed` with the block's address, `segment_alloc` and its like, `oom` with the
rounded size.
"""

from typing import NamedTuple

from msgspec import Struct

from planner.allocator.blocks import SegmentState
from planner.program import Phase, Site

SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
ACTIONS = ("alloc", "free_requested", "free_completed", *SEGMENT_ACTIONS, "oom", "snapshot")


class HistoryEvent(NamedTuple):
    """One thing that torch's allocator did."""

    action: str  # one of `ACTIONS`
    address: int
    size_bytes: int  # of an allocation, as it was requested
    site: int = -1  # index into the sites of the history; -1: not known
    stream: int = 0  # any number of its own; 0: the default stream


class HistoryMark(NamedTuple):
    """The start of a phase of the loop in a history."""

    allocations: int  # `alloc` events before it
    step: int
    phase: Phase


class History(Struct, frozen=True):
    """Events of the allocator of one GPU, from some moment of the process on."""

    gpu: str
    torch: str  # version
    alloc_conf: str  # the text of PYTORCH_ALLOC_CONF
    total_bytes: int | None  # the card's memory as torch sees it
    limit_bytes: int | None  # what `set_per_process_memory_fraction` allowed
    events: tuple[HistoryEvent, ...]
    marks: tuple[HistoryMark, ...] = ()
    sites: tuple[Site, ...] = ()  # allocating code: FILE:LINE of the user's code, function
    notes: tuple[str, ...] = ()  # what is odd about the record
    start: tuple[SegmentState, ...] = ()  # the reserved memory before the first event, by rising address
