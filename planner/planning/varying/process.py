"""Replay a process that trains on batches of several shapes, step after step, through one allocator.

Each step is taken from a trace of the job at the shape of its batch. A block that outlives its batch (of a
gradient, or of a variable of the loop) is the same variable in the traces of all shapes, and is freed when a
later batch frees this variable.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import MemoryLimits, Replay, ReplayedProcess
from planner.errors import ModelError
from planner.jobs import BatchShape, Job, Mode
from planner.planning.segments import Variable, find_variables, split_segments
from planner.program import (
    Alloc,
    Event,
    Free,
    KernelWorkspaces,
    NextWorkspaces,
    PhaseStart,
    Program,
    Trace,
)

_FIRST_LASTING = 2**40  # first number of blocks that outlive their batch; others keep their program's numbers

Specialize = Callable[[BatchShape], tuple[Program, KernelWorkspaces]]


class BatchEvents(Struct, frozen=True):
    """The events of one batch, with the indices of events that concern other batches."""

    trace: Trace
    lasting: tuple[tuple[int, Alloc, Variable], ...]  # allocations that outlive the batch
    freed: tuple[tuple[int, Free, int, Variable], ...]  # with the batches since allocation, -1: in the set-up
    starts: tuple[tuple[int, PhaseStart], ...]


class _Part(Struct, frozen=True):
    """The part of a program that covers one batch."""

    index: int
    program: Program
    variables: dict[int, tuple[int, Variable]]

    def at(self, batch: int, workspaces: KernelWorkspaces) -> BatchEvents:
        """Return the events of the part at a batch size."""
        trace, variables = self.program.instantiate(batch, workspaces), self.variables
        lasting, freed, starts = [], [], []
        for place, event in enumerate(trace.events):
            if isinstance(event, PhaseStart):
                starts.append((place, event))
            elif event.block in variables:  # also a workspace whose number equals a later batch's block
                born, variable = variables[event.block]
                if isinstance(event, Alloc):
                    if born == self.index:
                        lasting.append((place, event, variable))
                elif born < self.index:
                    freed.append((place, event, self.index - born if born else -1, variable))
        return BatchEvents(trace, tuple(lasting), tuple(freed), tuple(starts))


def _parts(program: Program) -> list[list[_Part]]:
    """Return the parts of a program by step; step 0 is the set-up."""
    segments = split_segments(program.events)
    variables = find_variables(segments)
    ends = [segment.start for segment in segments[1:]] + [len(program.events)]
    steps: list[list[_Part]] = [[] for _ in range(segments[-1].step + 1)]
    for index, (segment, end) in enumerate(zip(segments, ends, strict=True)):
        start = segment.start if index else -1  # a call at the place of the first event runs before it
        calls = tuple(
            replace(call, position=call.position - segment.start)
            for call in program.calls
            if start < call.position <= end
        )
        events = tuple(segment.events)
        part = Program(events, program.sites, calls, unknown_ops=program.unknown_ops)
        steps[segment.step].append(_Part(index, part, variables))
    return steps


def _renumbered(event: Alloc, block: int) -> Alloc:
    return replace(event, block=block)


class BatchSource:
    """A cache of the events of a job's batches, by shape and step."""

    def __init__(self, job: Job, specialize: Specialize, next_workspaces: NextWorkspaces | None) -> None:
        """Create the cache of a job, given its program at each shape and its traces' `next_workspaces`."""
        self.next_workspaces = next_workspaces
        self.usual_step = job.steps - 1 if job.mode is Mode.FORWARD else job.steps
        self._specialize = specialize
        self._parts: dict[int, tuple[Program, list[list[_Part]]]] = {}  # by the program's identity
        self._made: dict[tuple[BatchShape, int], list[BatchEvents]] = {}

    def batches(self, shape: BatchShape, step: int) -> list[BatchEvents]:
        """Return the events of each batch of a step at a shape; step 0 is the set-up.

        There are several batches only if the job accumulates gradients.
        """
        step = min(step, self.usual_step)
        if (shape, step) not in self._made:
            program, workspaces = self._specialize(shape)
            if id(program) not in self._parts:
                self._parts[id(program)] = program, _parts(program)
            _, parts = self._parts[id(program)]
            self._made[shape, step] = [part.at(shape.batch, workspaces) for part in parts[step]]
        return self._made[shape, step]

    def forget(self) -> None:
        """Clear the cached events, which the next batch size does not need."""
        self._made.clear()


class VaryingProcess:
    """The replay of a process that trains on batches of several shapes, step by step."""

    def __init__(self, source: BatchSource, limits: MemoryLimits, first: BatchShape) -> None:
        """Replay the set-up that comes before a first batch of this shape."""
        self._source = source
        self._process = ReplayedProcess(limits, source.next_workspaces)
        self._live: dict[tuple[int, Variable], int] = {}
        self._lasting = _FIRST_LASTING
        self._place = self.steps = 0
        (setup,) = source.batches(first, 0)
        self.is_alive = self._play(setup)

    def step(self, shapes: Sequence[BatchShape]) -> bool:
        """Replay a step with batches of these shapes, and return whether it fits in memory."""
        self.steps += 1
        of_shape = [self._source.batches(shape, self.steps) for shape in shapes]
        for number, batches in enumerate(of_shape):
            if self.is_alive:
                self._place += 1
                self.is_alive = self._play(batches[min(number, len(batches) - 1)])
        return self.is_alive

    def copy(self) -> "VaryingProcess":
        """Return an independent copy of the process in its present state."""
        twin = object.__new__(VaryingProcess)
        twin.__dict__.update(self.__dict__)
        twin._process, twin._live = self._process.copy(), dict(self._live)
        return twin

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that are reserved now."""
        return self._process.allocator.reserved_bytes

    def replay(self, batch: int) -> Replay:
        """Return the figures of the replay up to now, labelled with this batch size."""
        return self._process.result(batch)

    def _play(self, batch: BatchEvents) -> bool:
        events: list[Event] = [*batch.trace.events]
        place, live = self._place, self._live
        for index, alloc, variable in batch.lasting:
            self._lasting += 1
            live[place, variable] = self._lasting
            events[index] = _renumbered(alloc, self._lasting)
        for index, free, age, variable in batch.freed:
            block = live.pop((0 if age < 0 else place - age, variable), None)
            if block is None:
                raise ModelError(
                    "the model goes through batches of other sizes in another way, so that a run of several "
                    "sizes cannot be planned; give one size"
                )
            events[index] = replace(free, block=block)
        for index, start in batch.starts:
            events[index] = PhaseStart(self.steps, start.phase)
        return self._process.play(replace(batch.trace, events=tuple(events)))
