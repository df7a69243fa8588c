"""A process through the simulator of the caching allocator: the figures that it would print.

All steps share one allocator, so what an earlier model leaves behind counts for the later ones. Weights are
placed once and reused by every later loop of their model. cuBLAS takes a workspace once for each thread
that multiplies matrices, the forward pass's and autograd's, and never gives it back.
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

JobTracer = Callable[[Job, int], Trace]  # a job's trace at a batch size

TRACED_STEPS = 3  # the first makes gradients and optimizer state, the others ought to be the same
MOST_UNSETTLED_STEPS = 100

# Where the gradients of an earlier loop are set to None. `AFTER_STEP` leaves none to the next loop.
_ZEROED_IN = {ZeroGrad.BEFORE_FORWARD: Phase.FORWARD, ZeroGrad.BEFORE_BACKWARD: Phase.BACKWARD}


def run_process(process: Process, tracer: JobTracer, limits: MemoryLimits = UNLIMITED) -> ProcessLog:
    """Return the output of a process, up to its end or to the request that cannot be served.

    Raises ValueError for a process in which `find_invalid_step` finds one, ModelError for a long loop that
    does not settle, and what the tracer raises.
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
    """A request that cannot be served, which torch raises as OutOfMemoryError."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(requested_bytes)
        self.requested_bytes = requested_bytes


@dataclass(slots=True)
class _Placed:
    """The memory of a model on the GPU apart from its loop."""

    weights: dict[int, Block] = field(default_factory=dict)  # by their number in the set-up of each trace
    gradients: list[Block] = field(default_factory=list)  # of a loop that was left


@dataclass(slots=True)
class _Running:
    """A loop on its way, and after it while its names live."""

    loop: StepSequence
    model: _Placed
    zeroed_in: Phase | None = None  # where in the first step gradients of an earlier loop die
    # Live blocks with their categories, by the step that requested them and their number there.
    held: dict[tuple[int, int], tuple[Block, Category]] = field(default_factory=dict)


class _Machine:
    """One process with its allocator."""

    def __init__(self, tracer: JobTracer, limits: MemoryLimits) -> None:
        self.readings: list[MemoryReading] = []
        self.loop_step: int | None = None
        self.phase: Phase | None = None
        self._tracer = tracer
        self.allocator = CachingAllocator(limits)
        self._tensors: dict[str, Block] = {}
        self._models: dict[str, _Placed] = {}
        self._running: _Running | None = None  # whose names live
        self._optional = OptionalRequests()
        self._served: set[tuple[bool, int]] = (
            set()
        )  # threads (whether autograd's) and streams with a workspace
        self._section = ""

    def take(self, step: Step) -> None:
        """Do one step of a process without flaw."""
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
        # Any loop of the model shows its weights; that of its training will probably be needed as well.
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
        """Return a training loop that knows this number of steps."""
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
        """Request the weights that are not on the GPU: all, or a buffer that an earlier loop replaced."""
        weights = running.model.weights
        requests = [action for action in running.loop.setup if isinstance(action, Malloc)]
        for number, request in enumerate(requests):
            if request.category is Category.PARAMETER:
                if number not in weights:
                    weights[number] = self._malloc(request.size_bytes)
                running.held[0, number] = weights[number], request.category

    def _play(self, running: _Running, step: int) -> None:
        """Let the allocator serve one step, 0 being the set-up; held blocks are not requested again."""
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
        """Begin a phase of a loop's first step."""
        if self.phase is Phase.FORWARD:
            self._bring_weights(running)  # torchinfo makes the input first, then moves the model
        if self.phase is running.zeroed_in:
            for block in running.model.gradients:
                self.allocator.free(block)
            running.model.gradients.clear()

    def _keep(self, size: int, stream: int) -> None:
        """Allocate a workspace that this thread never frees on this stream."""
        place = self.phase is Phase.BACKWARD, stream
        if place not in self._served:
            self._served.add(place)
            self._malloc(size, stream)

    def _leave(self, running: _Running) -> None:
        """Free what the names of a loop hold; the model keeps its weights and gradients."""
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
    """Return the job as torchinfo runs it."""
    return replace(job, mode=Mode.INFER, target=None, steps=1)
