"""Write a simulated run as a snapshot for torch's memory_viz.

The file is the pickle of `torch.cuda.memory._snapshot()`. Layout: the docstring of
`torch.cuda.memory._snapshot` and torch/csrc/cuda/Module.cpp. Its readers are torch/cuda/_memory_viz.py and,
in the browser, torch/utils/viz/MemoryViz.js, which knows pickles of protocol 2 to 4 and colours by
`category`. Frames name modules instead of functions, the innermost first, as in torch.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from planner._support.atomic_write import save
from planner.allocator.blocks import Block, SegmentEvent, SegmentState
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MemoryLimits, format_alloc_conf
from planner.allocator.replay import replay_trace
from planner.program import Alloc, Category, Event, Phase, PhaseStart, Trace

PROTOCOL = 4  # the latest protocol that MemoryViz.js reads
LOOP = "training loop"
# MemoryViz.js fails if no block has the category `unknown`.
_UNKNOWN = "unknown"

Frames = list[dict[str, Any]]


def save_snapshot(trace: Trace, limits: MemoryLimits, path: Path) -> None:
    """Replay a trace, and write its snapshot to a file atomically. Raises DataFileError."""
    save(path, pickle.dumps(make_snapshot(trace, limits), protocol=PROTOCOL), "the snapshot")


def make_snapshot(trace: Trace, limits: MemoryLimits) -> dict[str, Any]:
    """Replay a trace, and return its snapshot up to the first request that fails."""
    recorder = _SnapshotRecorder(trace, limits)
    replay_trace(trace, limits, recorder, recorder.changes)
    recorder.add("snapshot", 0, 0, [])
    at = {one.address: one for one in recorder.live.values()}
    return {
        "segments": [_segment(segment, at, limits) for segment in recorder.segments()],
        "device_traces": [recorder.entries],
        "allocator_settings": _settings(limits),
        "external_annotations": [],
    }


class _SnapshotRecorder:
    """A callback for `replay_trace` that records the entries of a snapshot's device trace."""

    def __init__(self, trace: Trace, limits: MemoryLimits) -> None:
        self.changes: list[SegmentEvent] = []
        self.live: dict[int, _Live] = {}
        self.entries: list[dict[str, Any]] = []
        self._frames = _FrameMaker(trace)
        self._limits = limits
        self._allocator: CachingAllocator | None = None

    def __call__(self, allocator: CachingAllocator, index: int, event: Event, block: Block | None) -> None:
        self._allocator = allocator
        if isinstance(event, PhaseStart):
            self._frames.mark = event
        elif isinstance(event, Alloc):
            size = event.size_bytes
            stack = self._frames.of(event)
            for change in self.changes:
                self.add(change.action, change.address, change.size_bytes, stack, stream=event.stream)
            self.changes.clear()
            if block is None or not block.size_bytes:  # an optional workspace failed: the process continues
                self.add("oom", 0, size, stack, stream=event.stream)
                del self.entries[-1]["addr"]
                capacity_bytes = self._limits.capacity_bytes
                free = 0 if capacity_bytes is None else capacity_bytes - allocator.reserved_bytes
                self.entries[-1]["device_free"] = free
                return
            self.live[event.block] = _Live(block.address, size, event.category, stack, event.stream)
            self.add("alloc", block.address, size, stack, event.category, event.stream)
        elif event.block in self.live:
            dead = self.live.pop(event.block)
            for action in ("free_requested", "free_completed"):
                self.add(action, dead.address, dead.requested_bytes, [], dead.category, dead.stream)
            for change in self.changes:  # caused by emptying the cache
                self.add(change.action, change.address, change.size_bytes, [])
            self.changes.clear()

    def add(
        self,
        action: str,
        address: int,
        size_bytes: int,
        frames: Frames,
        category: str = _UNKNOWN,
        stream: int = 0,
    ) -> None:
        """Append a trace entry whose time is the number of earlier entries."""
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": size_bytes,
                "stream": stream,
                "time_us": len(self.entries),
                "frames": frames,
                "category": str(category),
                "pool_id": (0, 0),
            }
        )

    def segments(self) -> tuple[SegmentState, ...]:
        """Return the segments after the last event, or () if no event was replayed."""
        return () if self._allocator is None else tuple(self._allocator.snapshot())


class _Live(Struct, frozen=True):
    """A block in use, with its requested size and stack."""

    address: int
    requested_bytes: int
    category: Category
    frames: Frames
    stream: int


class _FrameMaker:
    """A maker of stack frames for allocations. Equal stacks are one object."""

    def __init__(self, trace: Trace) -> None:
        self.mark = PhaseStart(0, Phase.SETUP)
        self._trace = trace
        self._details = {detail.block: detail for detail in trace.provenance}
        self._made: dict[tuple[int, str, str, PhaseStart], Frames] = {}

    def of(self, event: Alloc) -> Frames:
        """Return an allocation's stack frames, innermost first: operator, source line, modules and loop."""
        detail = self._details.get(event.block)
        source, code = ("", "") if detail is None else (detail.source, detail.code)
        key = (event.site, source, code, self.mark)
        if key not in self._made:
            self._made[key] = list(self._frames(event.site, source, code))
        return self._made[key]

    def _frames(self, site: int, source: str, code: str) -> Iterator[dict[str, Any]]:
        origin = self._trace.sites[site]
        file, _, line = source.rpartition(":")
        number = int(line) if line.isdigit() else 0
        yield _frame(origin.module or LOOP, number, origin.op)
        if file:
            yield _frame(file, number, code)
        parts = origin.module.split(".")[:-1] if origin.module else []
        for length in range(len(parts), 0, -1):
            yield _frame(".".join(parts[:length]), 0, "forward")
        yield _frame(LOOP, 0, f"step {self.mark.step} {self.mark.phase}")


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _segment(segment: SegmentState, live: dict[int, _Live], limits: MemoryLimits) -> dict[str, Any]:
    used = [block for block in segment.blocks if block.in_use]
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": sum(block.size_bytes for block in used),
        "active_size": sum(block.size_bytes for block in used),
        "requested_size": sum(live[block.address].requested_bytes for block in used),
        "stream": segment.stream,
        "segment_type": segment.pool,
        "segment_pool_id": (0, 0),
        "is_expandable": limits.config.expandable_segments,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": live[block.address].requested_bytes if block.in_use else 0,
                "state": "active_allocated" if block.in_use else "inactive",
                "frames": live[block.address].frames if block.in_use else [],
            }
            for block in segment.blocks
        ],
    }


def _settings(limits: MemoryLimits) -> dict[str, Any]:
    config = limits.config
    return {
        "PYTORCH_CUDA_ALLOC_CONF": format_alloc_conf(config),
        "max_split_size": -1 if config.max_split_bytes is None else config.max_split_bytes,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
    }
