"""The allocator of the published runs: torch 1.12 to 2.11, which reuse the block at the lowest address."""

from typing import Final

from planner.allocator.config import AllocatorConfig, MemoryLimits, config_of_torch
from planner.allocator.replay import Replay, replay_trace
from planner.program.events import Trace

PUBLISHED_CONFIG: Final[AllocatorConfig] = config_of_torch("2.11")
PUBLISHED: Final = MemoryLimits(config=PUBLISHED_CONFIG)


def replay_published(trace: Trace, batch: int, capacity_bytes: int | None = None) -> Replay:
    """Replay a trace as a published run, by default on a GPU without end."""
    return replay_trace(trace, MemoryLimits(capacity_bytes, config=PUBLISHED_CONFIG))
