"""Sample the memory of the allocator and the device during a job's steps."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace

from planner.allocator.history import (
    ACTIONS,
    MOST_EVENTS,
    History,
    HistoryEvent,
    HistoryMark,
    save_history,
    stream_numbers,
)
from planner.program import Phase

SAMPLE_SECONDS = 0.002
STEPS_UNTIL_LOADED = 3  # number of steps after which kernels and libraries are loaded
# Messages of errors for lack of memory: for tensors, for kernels that cannot be loaded, for cuBLAS handles,
# and for cuDNN if no plan's workspace can be allocated (aten/src/ATen/native/cudnn/Conv_v8.cpp).
OUT_OF_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED|unable to find an engine", re.IGNORECASE)


@dataclass(slots=True)
class CudaRun:
    """A recorder of memory readings during a run on a GPU."""

    level: Callable[[], int | None]  # reads the process's memory on the device, in bytes
    highest_bytes: int | None = None
    end_allocated_bytes: int | None = None
    context_after_bytes: int | None = None
    marks: list[HistoryMark] = field(default_factory=list)

    def sample(self) -> None:
        """Read the process's memory once, and keep the highest reading."""
        now = self.level()
        if now is not None:
            self.highest_bytes = max(now, self.highest_bytes or 0)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample the process's memory in another thread while the context is active.

        The memory is read every SAMPLE_SECONDS, and once at the end.
        """
        stop = threading.Event()

        def sample_until_stopped() -> None:
            while not stop.wait(SAMPLE_SECONDS):
                self.sample()

        thread = threading.Thread(target=sample_until_stopped, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.sample()

    def on_phase(self, step: int, phase: Phase) -> None:
        """Record the start of a phase, and read the memory. Synchronizes the device only at the phase END."""
        stats = torch.cuda.memory_stats()
        self.marks.append(HistoryMark(stats.get("allocation.all.allocated", 0), step, phase))
        self.sample()
        if phase is not Phase.END:
            return
        torch.cuda.synchronize()
        self.end_allocated_bytes = torch.cuda.memory_allocated()
        now = self.level()
        if now is not None and step >= STEPS_UNTIL_LOADED:
            self.context_after_bytes = now - torch.cuda.memory_reserved()


def save_recorded_history(path: Path, history: History) -> list[str]:
    """Save torch's recorded allocator history and return [], or return [remark] if events may be missing.

    `history` has all fields of the history except the events. It is not saved if torch may have dropped
    events.
    """
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    if len(entries) >= MOST_EVENTS:  # torch keeps only the last events
        return [f"allocator history of more than {MOST_EVENTS} events not saved"]
    recorded = [
        HistoryEvent(
            entry["action"],
            entry.get("device_free" if entry["action"] == "oom" else "addr", 0),
            entry.get("size", 0),
            stream=entry["stream"],
        )
        for entry in entries
        if entry["action"] in ACTIONS
    ]
    streams = stream_numbers(recorded)
    events = tuple(event._replace(stream=streams[event.stream]) for event in recorded)
    save_history(replace(history, events=events), path)
    return []
