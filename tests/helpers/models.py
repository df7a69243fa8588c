"""Helpers of the tests that trace: jobs on models built in the test, and readings of a trace."""

from collections.abc import Callable

import torch
from torch import nn

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.capture.session import record
from planner.jobs import Job, Loss, Mode, parse_tensor_spec
from planner.jobs.files.catalogue import load_catalogue
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Trace
from tests.helpers.structs import replace

AMPERE = (8, 6)
HOPPER = (9, 0)
MIB = 2**20


def job_of(*inputs: str, **fields: object) -> Job:
    """A job on a model that the test builds itself; forward only, one step, by default."""
    job = Job.create(
        "test", inputs=tuple(map(parse_tensor_spec, inputs)), mode=Mode.FORWARD, steps=1, loss=Loss.SUM
    )
    return job.replace(**fields)  # type: ignore[arg-type]


def on_meta(build: Callable[[], nn.Module]) -> Callable[[Job], nn.Module]:
    """What builds the model of any job with its parameters on meta."""

    def built(_: Job) -> nn.Module:
        with torch.device("meta"):
            return build()

    return built


def trace_of(
    build: Callable[[], nn.Module],
    job: Job,
    batch: int,
    capability: tuple[int, int] = AMPERE,
    sm_count: int | None = None,
) -> Trace:
    """The trace of a model that `build` makes, its parameters on meta."""
    return record(job, batch, capability, on_meta(build), sm_count=sm_count)


def trace_catalogue(name: str, batch: int | None = None, **fields: object) -> Trace:
    """The trace of a catalogue entry at its own batch size, or another, with fields of its job replaced."""
    entry = load_catalogue()[name]
    return record(entry.job.replace(**fields), batch or entry.batch, AMPERE)  # type: ignore[arg-type]


def born(trace: Trace, op: str = "") -> list[int]:
    """Sizes in bytes of the blocks that operators with `op` in their name allocated, in order."""
    return [e.size_bytes for e in trace.events if isinstance(e, Alloc) and op in trace.sites[e.site].op]


def levels(trace: Trace, phase: Phase) -> list[tuple[str, int]]:
    """Return after each birth in this phase the module that allocated, and the allocated bytes."""
    allocator = CachingAllocator()
    blocks: dict[int, Block] = {}
    seen = []
    now = Phase.SETUP
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.phase
        elif isinstance(event, Free):
            allocator.free(blocks.pop(event.block))
        else:
            block = allocator.malloc(event.size_bytes)
            assert block is not None
            blocks[event.block] = block
            if now is phase:
                seen.append((trace.sites[event.site].module, allocator.allocated_bytes))
    return seen


def story(trace: Trace) -> list[str]:
    """Births as `+bytes category`, deaths as `-bytes`, marks as `phase step`."""
    born: dict[int, Alloc] = {}
    lines = []
    for event in trace.events:
        if isinstance(event, PhaseStart):
            lines.append(f"{event.phase} {event.step}")
        elif isinstance(event, Free):
            lines.append(f"-{born[event.block].size_bytes}")
        else:
            born[event.block] = event
            lines.append(f"+{event.size_bytes} {event.category}")
    return lines


def story_of_tensors(trace: Trace) -> list[str]:
    """The story of a trace without its workspaces."""
    left_out = {e.block for e in trace.events if isinstance(e, Alloc) and e.category is Category.WORKSPACE}
    events = [e for e in trace.events if isinstance(e, PhaseStart) or e.block not in left_out]
    return story(replace(trace, events=tuple(events)))
