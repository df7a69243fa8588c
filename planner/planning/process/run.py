"""Replay a process through the simulated caching allocator, and read the allocator's figures.

All steps share one allocator, so memory that an earlier model leaves behind counts for later models. Weights
are placed once and reused by every later loop of their model. cuBLAS allocates a workspace once for each
thread that multiplies matrices (the forward pass's and autograd's) and never frees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from planner.allocator import UNLIMITED, MemoryLimits, ReplayedProcess
from planner.errors import ModelError
from planner.jobs import Job, Mode, ZeroGrad
from planner.planning.process.model import (
    Define,
    Delete,
    EmptyCache,
    Heading,
    Leave,
    MemoryReading,
    Model,
    OutOfMemory,
    Place,
    Print,
    Process,
    ProcessLog,
    ResetPeak,
    Step,
    Summary,
    Train,
    find_invalid_step,
    size_bytes,
)
from planner.program import (
    FIRST_LASTING,
    Alloc,
    Category,
    Event,
    Free,
    Joiner,
    Phase,
    PhaseStart,
    Piece,
    Site,
    Trace,
    Variable,
    cut_trace,
    is_periodic,
)

JobTracer = Callable[[Job, int], Trace]  # returns a job's trace at a batch size

TRACED_STEPS = 3  # the first allocates gradients and optimizer state, the others should be equal
MOST_UNSETTLED_STEPS = 100

_NOWHERE = Trace((), (Site("", ""),), 1)  # the trace of requests outside of loops

# The phase in which an earlier loop's gradients are set to None. `AFTER_STEP` leaves no gradients to the
# next loop.
_ZEROED_IN = {ZeroGrad.BEFORE_FORWARD: Phase.FORWARD, ZeroGrad.BEFORE_BACKWARD: Phase.BACKWARD}


def run_process(process: Process, tracer: JobTracer, limits: MemoryLimits = UNLIMITED) -> ProcessLog:
    """Replay a process to its end or first failure, and return its log.

    The log has the readings and the failure. Raises ValueError if `find_invalid_step` finds an invalid step,
    ModelError for a long loop whose steps do not become equal, and the errors of the tracer.
    """
    flaw = find_invalid_step(process)
    if flaw is not None:
        raise ValueError(f"step {flaw.index}: {flaw.what}")
    machine = _Machine(tracer, limits)
    failure = None
    for index, step in enumerate(process):
        try:
            machine.take(step)
        except _NoRoomError as error:
            failure = OutOfMemory(index, machine.loop_step, machine.phase, error.requested_bytes)
            break
    return ProcessLog(tuple(machine.readings), machine.process.allocator.retries, failure)


class _NoRoomError(Exception):
    """The error for a memory request at which torch would raise OutOfMemoryError."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(requested_bytes)
        self.requested_bytes = requested_bytes


@dataclass(slots=True)
class _Placed:
    """The weights and left-over gradients that a model holds on the GPU outside of a loop."""

    weights: dict[Variable, int] = field(default_factory=dict)  # equal in the set-ups of all its traces
    gradients: list[int] = field(default_factory=list)  # of a loop that was left


class _Running:
    """A loop of a process while its variables are alive, whether it still runs or has ended."""

    def __init__(self, trace: Trace, model: _Placed, joiner: Joiner, zeroed_in: Phase | None = None) -> None:
        self.model, self.joiner, self.zeroed_in = model, joiner, zeroed_in  # zeroed_in: see `_ZEROED_IN`
        self.steps = cut_trace(trace)
        freed = {event.block for event in trace.events if isinstance(event, Free)}
        # Workspaces that are never freed: a library keeps each for the rest of the process.
        self.kept = {
            event.block
            for event in trace.events
            if isinstance(event, Alloc) and event.category is Category.WORKSPACE and event.block not in freed
        }
        (self.setup,) = self.steps[0]
        self.joined = joiner.join(self.setup, 0)
        events = ((own, self.joined.events[index]) for index, own in self.setup.lasting)
        self.weights = {
            variable: event
            for variable, event in events
            if isinstance(event, Alloc) and event.category is Category.PARAMETER
        }


class _Machine:
    """The replay of one process, with its allocator."""

    def __init__(self, tracer: JobTracer, limits: MemoryLimits) -> None:
        self.readings: list[MemoryReading] = []
        self.loop_step: int | None = None
        self.phase: Phase | None = None
        self._tracer = tracer
        self.process = ReplayedProcess(limits)
        self._numbers = count(FIRST_LASTING)  # of blocks that outlive their piece
        self._tensors: dict[str, int] = {}
        self._models: dict[str, _Placed] = {}
        self._running: _Running | None = None  # the loop whose variables are alive
        # Pairs of a thread (True for autograd's) and a stream for which a cuBLAS workspace exists.
        self._served: set[tuple[bool, int]] = set()
        self._section = ""

    def take(self, step: Step) -> None:
        """Replay one step of a valid process."""
        self.loop_step = self.phase = None
        match step:
            case Heading(text):
                self._section = text
            case Print(label):
                self._read(label)
            case Define(name, tensor):
                block = next(self._numbers)
                self._replay(_NOWHERE, [Alloc(block, size_bytes(tensor), Category.TEMPORARY, 0)])
                if name in self._tensors:
                    self._free(self._tensors[name])
                self._tensors[name] = block
            case Delete(names):
                for name in names:
                    self._delete(name)
            case EmptyCache():
                self.process.allocator.empty_cache()
            case ResetPeak():
                self.process.allocator.reset_peaks()
            case Place(model):
                self._place(model)
            case Summary(model, batch):
                running = self._open(_summarised(model.job), model, batch)
                self._play(running, 1)
                self._leave(running)
            case Train():
                self._train(step)
            case Leave():
                assert self._running is not None
                self._leave(self._running)
                self._running = None

    def _read(self, label: str) -> None:
        of = self.process.allocator
        figures = (of.allocated_bytes, of.reserved_bytes, of.peak_allocated_bytes)
        self.readings.append(MemoryReading(self._section, label, *figures))

    def _delete(self, name: str) -> None:
        if name in self._tensors:
            self._free(self._tensors.pop(name))
            return
        model = self._models.pop(name)
        self._free(*model.weights.values(), *model.gradients)

    def _place(self, model: Model) -> None:
        self.loop_step, self.phase = 0, Phase.SETUP
        # Any loop of the model shows its weights; the training loop will probably be needed later as well.
        job = _trained(model.job) if model.job.loop.mode is Mode.TRAIN else _summarised(model.job)
        self._bring_weights(self._open(job, model, model.batch))

    def _train(self, train: Train) -> None:
        self.loop_step, self.phase = 0, Phase.SETUP
        job, steps = train.model.job, train.steps_per_epoch * train.epochs
        running = self._open(_trained(job), train.model, train.batch, _ZEROED_IN.get(job.loop.zero_grad))
        if steps >= len(running.steps) and not is_periodic(running.steps):
            if steps > MOST_UNSETTLED_STEPS:
                raise ModelError(
                    f"{job.model.name}: its steps differ from one another, so that each has to be traced, "
                    f"and {steps} are too many; train at most {MOST_UNSETTLED_STEPS}"
                )
            running = self._open(job.replace(steps=steps), train.model, train.batch, running.zeroed_in)
        self._bring_weights(running)
        self._play_piece(running, running.setup, running.joined, 0)
        for step in range(1, steps + 1):
            self._play(running, step)
            if train.label is not None and step % train.steps_per_epoch == 0:
                self._read(train.label)
        self._running = running

    def _open(self, job: Job, model: Model, batch: int, zeroed_in: Phase | None = None) -> _Running:
        """Return a new loop that shares the model's weights on the GPU, without allocating any block."""
        placed = self._models.setdefault(model.name, _Placed())
        running = _Running(self._tracer(job, batch), placed, Joiner(self._numbers), zeroed_in)
        running.joiner.live = {
            (0, variable): placed.weights.get(variable, event.block)
            for variable, event in running.weights.items()
        }
        return running

    def _bring_weights(self, running: _Running) -> None:
        """Allocate the loop's weights that are not on the GPU yet.

        The missing weights are all weights of the model, or only buffers that an earlier loop replaced.
        """
        weights = running.model.weights
        missing = {own: event for own, event in running.weights.items() if own not in weights}
        weights |= {own: event.block for own, event in missing.items()}
        self._replay(running.joined, [*missing.values()])

    def _play(self, running: _Running, step: int) -> None:
        """Replay one step of a loop. A step beyond the traced steps repeats the last traced step."""
        for piece in running.steps[min(step, len(running.steps) - 1)]:
            self._play_piece(running, piece, running.joiner.join(piece, step), step)

    def _play_piece(self, running: _Running, piece: Piece, joined: Trace, step: int) -> None:
        """Replay a piece of a loop phase by phase.

        The set-up's weights and existing workspaces are not allocated again.
        """
        self.loop_step = step
        lasting, events = dict(piece.lasting), list[Event]()
        given_back = {index: variable for index, age, variable in piece.freed if age < 0}
        for index, (own, event) in enumerate(zip(piece.trace.events, joined.events, strict=True)):
            if isinstance(event, PhaseStart):
                self._replay(joined, events)
                events.clear()
                self.phase = event.phase
                if step == 1:
                    self._enter(running)
            elif index not in lasting or not isinstance(event, Alloc) or not isinstance(own, Alloc):
                events.append(event)
                if index in given_back:
                    running.model.weights.pop(given_back[index], None)
            elif own.block in running.kept:
                running.joiner.live.pop((running.joiner.index, lasting[index]), None)
                if self._is_unserved(event.stream):
                    events.append(event)
            elif step or event.category is not Category.PARAMETER:
                running.joiner.live[running.joiner.index, lasting[index]] = event.block
                events.append(event)
        self._replay(joined, events)

    def _enter(self, running: _Running) -> None:
        """Allocate missing weights before a forward pass, and free old gradients before phase `zeroed_in`.

        Called at the start of each phase of a loop's first step.
        """
        if self.phase is Phase.FORWARD:
            self._bring_weights(running)  # torchinfo allocates the input first, then moves the model
        if self.phase is running.zeroed_in:
            self._free(*running.model.gradients)
            running.model.gradients.clear()

    def _is_unserved(self, stream: int) -> bool:
        """Return whether cuBLAS has no workspace yet for the current thread and a stream, and record one.

        The next call returns False. The thread is autograd's in a backward pass, otherwise the main thread.
        """
        place = self.phase is Phase.BACKWARD, stream
        is_unserved = place not in self._served
        self._served.add(place)
        return is_unserved

    def _leave(self, running: _Running) -> None:
        """Free the blocks that a loop's variables hold; the model keeps its weights and gradients."""
        for (_, (category, _)), block in running.joiner.live.items():
            if category is Category.GRADIENT:
                running.model.gradients.append(block)
            elif category is not Category.PARAMETER:
                self._free(block)

    def _free(self, *blocks: int) -> None:
        self._replay(_NOWHERE, [Free(block) for block in blocks])

    def _replay(self, trace: Trace, events: Sequence[Event]) -> None:
        """Replay events of a trace. Raises _NoRoomError for a request that cannot be served."""
        if not self.process.play(replace(trace, events=tuple(events))):
            assert self.process.failure is not None
            raise _NoRoomError(self.process.failure.requested_bytes)


def _trained(job: Job) -> Job:
    return job.replace(steps=TRACED_STEPS)


def _summarised(job: Job) -> Job:
    """Return the job that torchinfo runs: one inference step without a target."""
    return job.replace(mode=Mode.INFER, target=None, steps=1)
