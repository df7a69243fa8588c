"""Replay a process through the simulated caching allocator, and read the figures that it would print.

All steps share one allocator, so memory that an earlier model leaves behind counts for later models. Weights
are placed once and reused by every later loop of their model. cuBLAS allocates a workspace once for each
thread that multiplies matrices (the forward pass's and autograd's) and never frees it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from planner.allocator import UNLIMITED, Block, CachingAllocator, MemoryLimits, OptionalRequests
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
from planner.program import Category, Dealloc, Malloc, Phase, Retain, StepSequence, Trace, split_steps

JobTracer = Callable[[Job, int], Trace]  # returns a job's trace at a batch size

TRACED_STEPS = 3  # the first allocates gradients and optimizer state, the others should be equal
MOST_UNSETTLED_STEPS = 100

# The phase in which an earlier loop's gradients are set to None. `AFTER_STEP` leaves none to the next loop.
_ZEROED_IN = {ZeroGrad.BEFORE_FORWARD: Phase.FORWARD, ZeroGrad.BEFORE_BACKWARD: Phase.BACKWARD}


def run_process(process: Process, tracer: JobTracer, limits: MemoryLimits = UNLIMITED) -> ProcessLog:
    """Replay a process and return its readings, up to its end or to the first request that cannot be served.

    Raises ValueError if `find_invalid_step` finds an invalid step, ModelError for a long loop whose steps do
    not become equal, and the errors of the tracer.
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
    return ProcessLog(tuple(machine.readings), machine.allocator.retries, failure)


class _NoRoomError(Exception):
    """A memory request that cannot be served, for which torch raises OutOfMemoryError."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(requested_bytes)
        self.requested_bytes = requested_bytes


@dataclass(slots=True)
class _Placed:
    """The blocks that a model holds on the GPU outside of a loop: weights and left-over gradients."""

    weights: dict[int, Block] = field(default_factory=dict)  # by their number in the set-up of each trace
    gradients: list[Block] = field(default_factory=list)  # of a loop that was left


@dataclass(slots=True)
class _Running:
    """A loop that is running, or that has ended while its variables are still alive."""

    loop: StepSequence
    model: _Placed
    zeroed_in: Phase | None = None  # the phase of the first step that frees an earlier loop's gradients
    # Live blocks with their categories, by the step that requested them and their number there.
    held: dict[tuple[int, int], tuple[Block, Category]] = field(default_factory=dict)


class _Machine:
    """The replay of one process, with its allocator."""

    def __init__(self, tracer: JobTracer, limits: MemoryLimits) -> None:
        self.readings: list[MemoryReading] = []
        self.loop_step: int | None = None
        self.phase: Phase | None = None
        self._tracer = tracer
        self.allocator = CachingAllocator(limits)
        self._tensors: dict[str, Block] = {}
        self._models: dict[str, _Placed] = {}
        self._running: _Running | None = None  # the loop whose variables are alive
        self._optional = OptionalRequests()
        self._served: set[tuple[bool, int]] = (
            set()
        )  # threads (whether autograd's) and streams with a workspace
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
                block = self._malloc(size_bytes(tensor))
                if name in self._tensors:
                    self.allocator.free(self._tensors[name])
                self._tensors[name] = block
            case Delete(names):
                for name in names:
                    self._delete(name)
            case EmptyCache():
                self.allocator.empty_cache()
            case ResetPeak():
                self.allocator.reset_peaks()
            case Place(model):
                self._place(model)
            case Summary(model, batch):
                running = _Running(self._trace(_summarised(model.job), batch), self._model(model))
                self._play(running, 1)
                self._leave(running)
            case Train():
                self._train(step)
            case Leave():
                assert self._running is not None
                self._leave(self._running)
                self._running = None

    def _read(self, label: str) -> None:
        of = self.allocator
        figures = (of.allocated_bytes, of.reserved_bytes, of.peak_allocated_bytes)
        self.readings.append(MemoryReading(self._section, label, *figures))

    def _delete(self, name: str) -> None:
        if name in self._tensors:
            self.allocator.free(self._tensors.pop(name))
            return
        model = self._models.pop(name)
        for block in (*model.weights.values(), *model.gradients):
            self.allocator.free(block)

    def _place(self, model: Model) -> None:
        self.loop_step, self.phase = 0, Phase.SETUP
        # Any loop of the model shows its weights; the training loop will probably be needed later as well.
        job = _trained(model.job) if model.job.mode is Mode.TRAIN else _summarised(model.job)
        self._bring_weights(_Running(self._trace(job, model.batch), self._model(model)))

    def _train(self, train: Train) -> None:
        self.loop_step, self.phase = 0, Phase.SETUP
        job, steps = train.model.job, train.steps_per_epoch * train.epochs
        loop = self._trace_through(job, train.batch, steps)
        running = _Running(loop, self._model(train.model), _ZEROED_IN.get(job.zero_grad))
        self._bring_weights(running)
        self._play(running, 0)
        for step in range(1, steps + 1):
            self._play(running, step)
            if train.label is not None and step % train.steps_per_epoch == 0:
                self._read(train.label)
        self._running = running

    def _model(self, model: Model) -> _Placed:
        return self._models.setdefault(model.name, _Placed())

    def _trace(self, job: Job, batch: int) -> StepSequence:
        return split_steps(self._tracer(job, batch))

    def _trace_through(self, job: Job, batch: int, steps: int) -> StepSequence:
        """Return a training loop that can be played for this number of steps.

        Steps are repeated if they have become equal, else all are traced. Raises ModelError if they are too
        many for that.
        """
        loop = self._trace(_trained(job), batch)
        if loop.is_periodic or steps <= len(loop.steps):
            return loop
        if steps > MOST_UNSETTLED_STEPS:
            raise ModelError(
                f"{job.model}: its steps differ from one another, so that each has to be traced, and {steps} "
                f"are too many; train at most {MOST_UNSETTLED_STEPS}"
            )
        return self._trace(replace(job, steps=steps), batch)

    def _bring_weights(self, running: _Running) -> None:
        """Allocate the weights of a loop that are not on the GPU yet.

        These are all weights, or buffers that an earlier loop replaced.
        """
        weights = running.model.weights
        requests = [action for action in running.loop.setup if isinstance(action, Malloc)]
        for number, request in enumerate(requests):
            if request.category is Category.PARAMETER:
                if number not in weights:
                    weights[number] = self._malloc(request.size_bytes)
                running.held[0, number] = weights[number], request.category

    def _play(self, running: _Running, step: int) -> None:
        """Replay one step of a loop through the allocator; step 0 is the set-up.

        Blocks that are already held are not requested again.
        """
        self.loop_step, self.phase = step, Phase.SETUP
        request = 0
        for action in running.loop.step(step):
            match action:
                case Malloc(size, category, optional, stream):
                    if (step, request) not in running.held:
                        running.held[step, request] = self._malloc(size, stream, optional), category
                    request += 1
                case Dealloc(age, number, empties_cache):
                    self.allocator.free(running.held.pop((step - age, number))[0])
                    if empties_cache:
                        self.allocator.empty_cache()
                    if age == step:
                        running.model.weights.pop(number, None)
                case Retain(size, stream):
                    self._keep(size, stream)
                case Phase():
                    self.phase = action
                    if step == 1:
                        self._enter(running)

    def _enter(self, running: _Running) -> None:
        """Place missing weights, or free an earlier loop's gradients, as a phase of the first step begins."""
        if self.phase is Phase.FORWARD:
            self._bring_weights(running)  # torchinfo allocates the input first, then moves the model
        if self.phase is running.zeroed_in:
            for block in running.model.gradients:
                self.allocator.free(block)
            running.model.gradients.clear()

    def _keep(self, size: int, stream: int) -> None:
        """Allocate a permanent workspace for the current thread and this stream, unless there is one."""
        place = self.phase is Phase.BACKWARD, stream
        if place not in self._served:
            self._served.add(place)
            self._malloc(size, stream)

    def _leave(self, running: _Running) -> None:
        """Free the blocks that a loop's variables hold; the model keeps its weights and gradients."""
        for block, category in running.held.values():
            if category is Category.GRADIENT:
                running.model.gradients.append(block)
            elif category is not Category.PARAMETER:
                self.allocator.free(block)

    def _malloc(self, size: int, stream: int = 0, is_optional: bool = False) -> Block:
        allocator = self.allocator
        if is_optional:
            block = self._optional.malloc(allocator, size, stream=stream)
        else:
            block = allocator.malloc(size, stream)
        if block is None:
            raise _NoRoomError(size)
        return block


def _trained(job: Job) -> Job:
    return replace(job, steps=TRACED_STEPS)


def _summarised(job: Job) -> Job:
    """Return the job that torchinfo runs: one inference step without a target."""
    return replace(job, mode=Mode.INFER, target=None, steps=1)
