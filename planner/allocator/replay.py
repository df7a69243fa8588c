"""Replay traces through the simulated allocator."""

from collections.abc import Callable, Hashable, Mapping, Sequence

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
    """A request that could not be served, with its step, phase, module and operator."""

    step: int
    phase: Phase
    module: str
    op: str
    requested_bytes: int


class Peaks(Struct, frozen=True):
    """The allocated and reserved peak of one part of the loop, counting memory allocated before it."""

    allocated_bytes: int
    reserved_bytes: int


class PhasePeak(Struct, frozen=True):
    """The allocated and reserved peak of one phase in one step, and the bytes allocated at its end."""

    step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    end_allocated_bytes: int


class Replay(Struct, frozen=True):
    """The outcome, peaks and retries of a replay, which ends at the first failed request."""

    batch: int
    outcome: Outcome
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int  # after the last replayed event
    retries: int  # times that cached segments were released to serve a request
    failure: Failure | None
    peak_event: int  # index of the event that first reached the allocated peak
    phase_peaks: tuple[PhasePeak, ...]  # in order: phases with events, each step's first phase, and the end

    @property
    def step_peaks(self) -> tuple[Peaks, ...]:
        """Return the peaks of each step that began; the first step includes the set-up."""
        steps: list[list[PhasePeak]] = []
        last = 0
        for peak in self.phase_peaks:
            if not steps or peak.step > last > 0:
                steps.append([])
            steps[-1].append(peak)
            last = max(peak.step, last)
        return tuple(map(highest, steps))

    @property
    def first_step(self) -> Peaks:
        """Return the peaks of the first step, with the set-up."""
        return self.step_peaks[0]

    @property
    def later_steps(self) -> Peaks | None:
        """Return the peaks of all steps after the first, or None if there are none."""
        later = self.step_peaks[1:]
        return highest(later) if later else None


def highest(parts: Sequence[Peaks] | Sequence[PhasePeak]) -> Peaks:
    """Return the highest allocated and the highest reserved bytes of several parts."""
    return Peaks(max(part.allocated_bytes for part in parts), max(part.reserved_bytes for part in parts))


# Called after each event with the allocator, the event's index, the event, and the block of an `Alloc`. The
# block is None if the request failed, which ends the replay.
OnEvent = Callable[[CachingAllocator, int, Event, Block | None], None]


def replay_trace(
    trace: Trace,
    limits: MemoryLimits = UNLIMITED,
    on_event: OnEvent | None = None,
    segment_events: list[SegmentEvent] | None = None,
) -> Replay:
    """Replay a trace in a new simulated process, and return its outcome, peaks and retries.

    The replay ends at the first request that fails. Changes of the reserved memory are appended to
    `segment_events`. Raises UsageError if the configuration limits the memory to a fraction of a total that
    `limits` do not give.
    """
    process = ReplayedProcess(limits, trace.next_workspaces, segment_events)
    process.play(trace, on_event)
    return process.result(trace.batch)


class ReplayedProcess:
    """A simulated process that replays traces in sequence, each in the memory that earlier traces left."""

    def __init__(
        self,
        limits: MemoryLimits = UNLIMITED,
        next_workspaces: NextWorkspaces | None = None,
        segment_events: list[SegmentEvent] | None = None,
    ) -> None:
        """Create a process without memory.

        `limits` and `segment_events` are as in `replay_trace`. `next_workspaces` returns the workspace sizes
        to try if a convolution's request is refused.
        """
        self.allocator = CachingAllocator(limits, segment_events=segment_events)
        self.failure: Failure | None = None
        self._optional = OptionalRequests(next_workspaces)
        self._blocks: dict[int, Block] = {}
        # The current phase, and the index of its event.
        self._start, self._started = PhaseStart(0, Phase.SETUP), -1
        self._peak_bytes = self._peak_event = self._played = 0
        self._phases: list[PhasePeak] = []

    def play(self, trace: Trace, on_event: OnEvent | None = None) -> bool:
        """Replay a trace, and return False if a request has failed in this or an earlier trace.

        The replay ends at the first request that fails.
        """
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
                self._phases += self._peaks_until(index)
                allocator.reset_peaks()
                phase_start = self._start = event
                self._started = index
            if on_event is not None:
                on_event(allocator, index, event, block)
        self._peak_bytes, self._peak_event = peak_bytes, peak_event
        self._played += len(trace.events)
        return self.failure is None

    def result(self, batch: int) -> Replay:
        """Return the outcome, peaks and retries of all traces replayed so far.

        `batch` is the batch size to state in it.
        """
        allocator, failure = self.allocator, self.failure
        phases = (*self._phases, *self._peaks_until(self._played)) or (self._phase_peak(),)
        if failure:
            outcome = Outcome.DOES_NOT_FIT
        else:
            outcome = Outcome.FITS_WITH_RETRIES if allocator.retries else Outcome.FITS
        return Replay(
            batch=batch,
            outcome=outcome,
            peak_allocated_bytes=self._peak_bytes,
            peak_reserved_bytes=max(phase.reserved_bytes for phase in phases),
            end_allocated_bytes=allocator.allocated_bytes,
            retries=allocator.retries,
            failure=failure,
            peak_event=self._peak_event,
            phase_peaks=phases,
        )

    def _peaks_until(self, index: int) -> tuple[PhasePeak, ...]:
        """Return a tuple with the peaks of the current phase, or () if `Replay.phase_peaks` omits the phase.

        A phase is not listed if it is not its step's first, has no events before `index`, and is not the end.
        """
        is_first = self._start.step > (self._phases[-1].step if self._phases else 0)
        is_listed = is_first or index - self._started > 1 or self._start.phase is Phase.END
        return (self._phase_peak(),) if is_listed else ()

    def _phase_peak(self) -> PhasePeak:
        start, of = self._start, self.allocator
        peaks = of.peak_allocated_bytes, of.peak_reserved_bytes, of.allocated_bytes
        return PhasePeak(start.step, start.phase, *peaks)

    def copy(self) -> "ReplayedProcess":
        """Return an independent copy of the process in the same state."""
        twin = object.__new__(ReplayedProcess)
        twin.allocator, twins = self.allocator.copy()
        twin.failure = self.failure
        twin._optional = self._optional.copy()
        twin._blocks = {
            number: twins.get(id(block), block) for number, block in self._blocks.items()
        }  # an empty block is in no segment, so it is not copied
        twin._start, twin._started, twin._phases = self._start, self._started, [*self._phases]
        twin._peak_bytes, twin._peak_event, twin._played = self._peak_bytes, self._peak_event, self._played
        return twin


def replay_with_breakdown(trace: Trace, limits: MemoryLimits) -> tuple[Replay, Mapping[Category, int]]:
    """Replay a trace, and return its `Replay` and the bytes of each category at the allocated peak.

    Blocks count with their full sizes, as in torch's `memory_allocated`; unused categories are 0. Raises the
    errors of `replay_trace`.
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
    """A handler of requests for convolution workspaces, which tries other sizes after a refusal.

    PyTorch tries cuDNN's engines in order, and fails if no workspace can be served. It reuses the engine for
    later calls of the same convolution, and starts again if that engine's workspace is refused
    (ATen/native/cudnn: Conv_v8.cpp, `benchmark_cache`). If the workspaces of the next engines are unknown,
    the process is assumed to continue without a workspace, also for later requests of the same key and size.
    """

    def __init__(self, following: NextWorkspaces | None = None) -> None:
        self._following = following
        self._taken: dict[tuple[Hashable, int], int] = {}  # by key and refused size: the size taken

    def copy(self) -> "OptionalRequests":
        """Return a copy with the same remembered workspace sizes."""
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
        """Allocate a workspace of the first size that can be served, or return None if all are refused.

        The size that served the same key and size before is tried first, then `size_bytes`, then the sizes of
        the next engines, or 0 bytes if these sizes are unknown.
        """
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
