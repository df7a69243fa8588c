"""Replay a trace through the simulated allocator."""

from collections.abc import Callable, Hashable, Mapping

from msgspec import Struct

from planner.allocator.blocks import Block, SegmentEvent
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import UNLIMITED, MemoryLimits
from planner.program import (
    Alloc,
    Category,
    Convolution,
    Event,
    Free,
    NextWorkspaces,
    Outcome,
    Phase,
    PhaseStart,
    Trace,
)


class Failure(Struct, frozen=True):
    """The request that could not be served."""

    step: int
    phase: Phase
    module: str
    op: str
    requested_bytes: int


class Peaks(Struct, frozen=True):
    """The most that was taken at once in some stretch of the loop, counting what was there before it."""

    allocated_bytes: int
    reserved_bytes: int


class Replay(Struct, frozen=True):
    """The result of a replay. After a failure the figures stand as they were when it struck."""

    batch: int
    outcome: Outcome
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int  # after the last step, the loop's names still alive
    retries: int  # times that cached segments were released to serve a request
    failure: Failure | None
    peak_event: int  # index of the event with which the allocated peak was reached first
    step_peaks: tuple[Peaks, ...]  # of each step that began, the first with the set-up before it

    @property
    def first_step(self) -> Peaks:
        """Return the peaks until the second step begins."""
        return self.step_peaks[0]

    @property
    def later_steps(self) -> Peaks | None:
        """Return the peaks of all steps after the first; None where none began."""
        later = self.step_peaks[1:]
        if not later:
            return None
        return Peaks(max(p.allocated_bytes for p in later), max(p.reserved_bytes for p in later))


# Called after each event with its index. An `Alloc` without a block could not be served and is the last one.
OnEvent = Callable[[CachingAllocator, int, Event, Block | None], None]


def replay_trace(
    trace: Trace,
    limits: MemoryLimits = UNLIMITED,
    on_event: OnEvent | None = None,
    segment_events: list[SegmentEvent] | None = None,
) -> Replay:
    """Run all events of the trace, up to the request that fails if one does.

    Changes of the reserved memory are appended to `segment_events`. Raises UsageError where the configuration
    names a fraction of a total that the memory limits do not give.
    """
    process = ReplayedProcess(limits, trace.next_workspaces, segment_events)
    process.play(trace, on_event)
    return process.result(trace.batch)


class ReplayedProcess:
    """A process whose allocator serves traces one after another, each with what the ones before left."""

    def __init__(
        self,
        limits: MemoryLimits = UNLIMITED,
        next_workspaces: NextWorkspaces | None = None,
        segment_events: list[SegmentEvent] | None = None,
    ) -> None:
        """Start without memory; the parameters are those of `replay_trace`."""
        self.allocator = CachingAllocator(limits, segment_events=segment_events)
        self.failure: Failure | None = None
        self._optional = OptionalRequests(next_workspaces)
        self._blocks: dict[int, Block] = {}
        self._start = PhaseStart(0, Phase.SETUP)
        self._peak_bytes = self._peak_event = self._played = 0
        self._steps: list[Peaks] = []

    def play(self, trace: Trace, on_event: OnEvent | None = None) -> bool:
        """Run all events of a trace, up to the request that fails; return whether none does."""
        allocator, blocks, convolutions = self.allocator, self._blocks, trace.convolution_by_block()
        malloc, free, optional = allocator.malloc, allocator.free, self._optional
        peak_bytes, peak_event, phase_start = self._peak_bytes, self._peak_event, self._start
        block: Block | None
        for index, event in enumerate(trace.events, self._played):
            if isinstance(event, Alloc):
                size = event.size_bytes
                if event.may_fail:
                    op, convolution = trace.sites[event.site].op, convolutions.get(event.block)
                    block = optional.malloc(allocator, size, op, convolution, event.stream)
                else:
                    block = malloc(size, event.stream)
                if block is None:
                    site = trace.sites[event.site]
                    self.failure = Failure(phase_start.step, phase_start.phase, site.module, site.op, size)
                    if on_event is not None:
                        on_event(allocator, index, event, None)
                    break
                blocks[event.block] = block
                if allocator.allocated_bytes > peak_bytes:
                    peak_bytes, peak_event = allocator.allocated_bytes, index
            elif isinstance(event, Free):
                block = None
                free(blocks.pop(event.block))
                if event.empties_cache:
                    allocator.empty_cache()
            else:
                block = None
                if event.step > phase_start.step > 0:
                    self._steps.append(Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
                    allocator.reset_peaks()
                phase_start = event
            if on_event is not None:
                on_event(allocator, index, event, block)
        self._peak_bytes, self._peak_event, self._start = peak_bytes, peak_event, phase_start
        self._played += len(trace.events)
        return self.failure is None

    def result(self, batch: int) -> Replay:
        """Return the figures up to now."""
        allocator, failure = self.allocator, self.failure
        steps = (*self._steps, Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
        if failure:
            outcome = Outcome.DOES_NOT_FIT
        else:
            outcome = Outcome.FITS_WITH_RETRIES if allocator.retries else Outcome.FITS
        return Replay(
            batch=batch,
            outcome=outcome,
            peak_allocated_bytes=self._peak_bytes,
            peak_reserved_bytes=max(peaks.reserved_bytes for peaks in steps),
            end_allocated_bytes=allocator.allocated_bytes,
            retries=allocator.retries,
            failure=failure,
            peak_event=self._peak_event,
            step_peaks=steps,
        )

    def copy(self) -> "ReplayedProcess":
        """Return a process in the same state, which goes on by itself."""
        twin = object.__new__(ReplayedProcess)
        twin.allocator, twins = self.allocator.copy()
        twin.failure = self.failure
        twin._optional = self._optional.copy()
        twin._blocks = {
            number: twins.get(id(block), block) for number, block in self._blocks.items()
        }  # an empty block is in no segment
        twin._start, twin._steps = self._start, [*self._steps]
        twin._peak_bytes, twin._peak_event, twin._played = self._peak_bytes, self._peak_event, self._played
        return twin


def replay_with_breakdown(trace: Trace, limits: MemoryLimits) -> tuple[Replay, Mapping[Category, int]]:
    """Replay the trace and return the bytes of the blocks in use at its allocated peak by category as well.

    Blocks count whole, as torch's `memory_allocated` counts them; unused categories are 0. Raises as
    `replay_trace` does.
    """
    sizes: dict[int, int] = {}

    def record(_: CachingAllocator, index: int, event: Event, block: Block | None) -> None:
        if block is not None and isinstance(event, Alloc):
            sizes[event.block] = block.size_bytes

    run = replay_trace(trace, limits, record)
    totals = dict.fromkeys(Category, 0)
    live: dict[int, Category] = {}
    for event in trace.events[: run.peak_event + 1]:
        if isinstance(event, Alloc) and event.block in sizes:
            live[event.block] = event.category
            totals[event.category] += sizes[event.block]
        elif isinstance(event, Free):
            totals[live.pop(event.block)] -= sizes[event.block]
    return run, totals


class OptionalRequests:
    """Requests for workspaces of convolutions, after which others follow where one is refused.

    PyTorch takes cuDNN's engines in turn, and fails where none of them can be served. It keeps the engine for
    later calls of the same convolution, and begins anew where that one is refused (ATen/native/cudnn:
    Conv_v8.cpp, `benchmark_cache`). Where the sizes of the next engines are not known it is taken to go on
    without a workspace, and so with later requests of the same key.
    """

    def __init__(self, following: NextWorkspaces | None = None) -> None:
        self._following = following
        self._taken: dict[tuple[Hashable, int], int] = {}  # in place of a size that was refused

    def copy(self) -> "OptionalRequests":
        """Return requests that remember the same."""
        twin = OptionalRequests(self._following)
        twin._taken = dict(self._taken)
        return twin

    def malloc(
        self,
        allocator: CachingAllocator,
        size_bytes: int,
        key: Hashable = "",
        convolution: Convolution | None = None,
        stream: int = 0,
    ) -> Block | None:
        """Return a block of the first size that can be served; None where none can."""
        place = (key if convolution is None else convolution), size_bytes
        taken = self._taken.get(place, size_bytes)
        block = allocator.malloc(taken, stream)
        if block is not None:
            return block
        following = None
        if self._following is not None and convolution is not None:
            following = self._following(convolution, size_bytes)
        for size in (size_bytes, *((0,) if following is None else following)):
            block = allocator.malloc(size, stream) if size != taken else None
            if block is not None:
                self._taken[place] = size
                return block
        return None
