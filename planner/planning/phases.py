"""Compute the memory peaks of a job's phases, from loading the model to resuming from a checkpoint."""

from collections.abc import Callable, Container, Iterable, Iterator
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import MemoryLimits, PhasePeak, Replay, highest, replay_trace
from planner.jobs import Job, Mode, Quantize
from planner.program import Alloc, Category, Event, Fact, Free, Phase, PhaseStart, Trace


class JobPhase(StrEnum):
    """A phase of a job, such as its first step or the saving of a checkpoint.

    The phases are listed in the order in which a script usually reaches them.
    """

    LOADING = "loading"  # the model is placed on the GPU
    FIRST_STEP = "first_step"  # gradients and optimizer state are allocated
    LATER_STEPS = "later_steps"
    EVALUATION = "evaluation"
    SAVING = "saving"  # a checkpoint between two steps: of sharded states, the shards of each rank
    GATHERING = "gathering"  # sharded weights, and states of FSDP2, to save them whole
    RESUMING = "resuming"  # from a checkpoint


class JobPhasePeak(Struct, frozen=True):
    """The allocated and reserved peaks of a phase in bytes.

    The peaks include memory from before the phase. They are None if the phase is not planned.
    """

    phase: JobPhase
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def is_planned(self) -> bool:
        """Return whether the phase's peaks are known."""
        return self.allocated_bytes is not None


def job_phases(job: Job, trace: Trace, run: Replay, limits: MemoryLimits) -> tuple[JobPhasePeak, ...]:
    """Return the phases of a job with their peaks, in the order of `JobPhase`.

    Args:
        job: the job. If it does not train, its phases are loading and its steps alone.
        trace: the trace that `run` replays.
        run: the replay that the peaks are read from, except the peaks of FSDP2's gathering and of resuming.
        limits: the limits under which a process gathers or resumes.

    `torch.save` copies each storage to the CPU by itself, and `torch.load` places each on the GPU again,
    where it was saved (torch/serialization.py). So the peak of saving is the memory allocated between two
    steps, and resuming takes the saved weights and optimizer state in addition to the model, or only the
    optimizer state if weights come from the CPU.

    `torch.distributed.checkpoint` copies each of FSDP2's shards to the CPU as well. A whole checkpoint
    gathers one parameter or state at a time. Before shards are loaded, the optimizer takes a step with
    gradients of zeros, which allocates its state (torch/distributed/checkpoint/state_dict.py).

    DeepSpeed saves each rank's weights and states as they are, and loads them to the CPU; states that the
    first step would allocate are allocated as they are loaded (runtime/engine.py). The trace contains its
    gathering of weights. If bitsandbytes quantizes weights, a checkpoint has the trained weights alone.

    With other shards, shards on the CPU and torchao's weights, these phases are not planned.
    """
    parts: dict[JobPhase, list[PhasePeak]] = {}
    for phase, peak in _phases(run):
        parts.setdefault(phase, []).append(peak)
    resuming = _resuming_of(job)
    if resuming is None:
        parts.pop(JobPhase.SAVING, None)
    elif JobPhase.SAVING in parts:
        parts[JobPhase.RESUMING] = [_last_peak(trace, (*setup_events(trace), *resuming(trace)), limits)]
        if shards := _fsdp_shards(job):
            parts[JobPhase.GATHERING] = [_gather(trace, shards, limits)]
    unplanned = (JobPhase.EVALUATION, JobPhase.SAVING, JobPhase.RESUMING) if trains(job) else ()
    return tuple(
        _peak_of(phase, parts.get(phase, [])) for phase in JobPhase if phase in parts or phase in unplanned
    )


def saved_blocks(trace: Trace) -> list[Alloc]:
    """Return the blocks of weights, buffers and optimizer state that are alive at the end of a trace."""
    return alive_blocks(trace.events, (Category.PARAMETER, Category.OPTIMIZER))


def alive_blocks(events: Iterable[Event], categories: Container[Category]) -> list[Alloc]:
    """Return the blocks of `categories` that are still allocated after all events."""
    alive: dict[int, Alloc] = {}
    for event in events:
        if isinstance(event, Alloc):
            if event.category in categories:
                alive[event.block] = event
        elif isinstance(event, Free):
            alive.pop(event.block, None)
    return list(alive.values())


def _resuming_of(job: Job) -> Callable[[Trace], Iterable[Event]] | None:
    """Return the function that makes the events of resuming from a checkpoint, or None if there is none.

    The events follow the set-up. There is no function if the job does not train, or if its checkpoints are
    not planned.
    """
    is_quantized = job.model.quantize is not Quantize.NONE
    if not trains(job) or job.model.quantize.is_of_torchao:
        return None
    if not _is_sharded(job):
        return _resume_trained if is_quantized else _resume_whole
    if job.sharding.deepspeed and not is_quantized:
        return _resume_zero
    return _resume_shards if _fsdp_shards(job) else None


def _resume_whole(trace: Trace) -> Iterable[Event]:
    """Return the events that allocate the weights, buffers and optimizer state of a saved checkpoint.

    If weights are loaded onto the CPU, only the optimizer state is allocated on the GPU.
    """
    is_state = Fact.WEIGHTS_FROM_HOST in trace.facts
    return _load(_states(trace) if is_state else saved_blocks(trace))


def _resume_trained(trace: Trace) -> Iterable[Event]:
    """Return the events that allocate the trained weights and the optimizer state of a saved checkpoint.

    Trained weights are as large as their gradients. If weights are loaded onto the CPU, only the optimizer
    state is allocated on the GPU.
    """
    begin, _ = _first_update(trace)
    weights = alive_blocks(trace.events[:begin], (Category.GRADIENT,))
    return _load([*(() if Fact.WEIGHTS_FROM_HOST in trace.facts else weights), *_states(trace)])


def _resume_zero(trace: Trace) -> Iterable[Event]:
    """Return the events that allocate the optimizer state that the set-up did not allocate.

    DeepSpeed allocates other states while it shards the model.
    """
    made = {event.block for event in setup_events(trace) if isinstance(event, Alloc)}
    return _load([block for block in _states(trace) if block.block not in made])


def _resume_shards(trace: Trace) -> Iterable[Event]:
    """Return the events of an optimizer step with zero gradients, which allocates the optimizer state.

    FSDP2's own gradients are parts of one block for each group of parameters. The zero gradients have one
    block for each parameter, until the blocks have as many bytes as the gradients.
    """
    begin, end = _first_update(trace)
    step = [event for event in trace.events[begin:end] if not isinstance(event, PhaseStart)]
    made = {event.block for event in step if isinstance(event, Alloc)}
    step = [event for event in step if event.block in made]
    left_bytes = sum(block.size_bytes for block in alive_blocks(trace.events[:begin], (Category.GRADIENT,)))
    zeros: list[Event] = []
    for event in setup_events(trace):
        if isinstance(event, Alloc) and event.category is Category.PARAMETER and left_bytes > 0:
            zeros.append(replace(event, block=-event.block - 1))
            left_bytes -= event.size_bytes
    return (PhaseStart(1, Phase.OPTIMIZER), *zeros, *step)


def _states(trace: Trace) -> list[Alloc]:
    """Return the blocks of optimizer state that are alive at the end of a trace."""
    return alive_blocks(trace.events, (Category.OPTIMIZER,))


def _load(blocks: Iterable[Alloc]) -> Iterable[Event]:
    """Return the events that begin a phase and allocate a new block as large as each of `blocks`."""
    copies = (replace(block, block=-number) for number, block in enumerate(blocks, start=1))
    return (PhaseStart(1, Phase.INPUTS), *copies)


def _first_update(trace: Trace) -> tuple[int, int]:
    """Return the event indices at which the first optimizer phase begins and ends."""
    starts = [(at, event.phase) for at, event in enumerate(trace.events) if isinstance(event, PhaseStart)]
    begin = next((at for at, phase in starts if phase is Phase.OPTIMIZER), len(trace.events))
    return begin, next((at for at, _ in starts if at > begin), len(trace.events))


def _gather(trace: Trace, shards: int, limits: MemoryLimits) -> PhasePeak:
    """Return the memory peaks of gathering all shards of each saved block, one block at a time."""
    gathered = (
        event
        for number, block in enumerate(saved_blocks(trace), start=1)
        for event in (replace(block, block=-number, size_bytes=shards * block.size_bytes), Free(-number))
    )
    return _last_peak(trace, (*trace.events, PhaseStart(1, Phase.END), *gathered), limits)


def setup_events(trace: Trace) -> tuple[Event, ...]:
    """Return the events before the first step."""
    starts = (i for i, event in enumerate(trace.events) if isinstance(event, PhaseStart) and event.step > 0)
    return trace.events[: next(starts, len(trace.events))]


def _last_peak(trace: Trace, events: tuple[Event, ...], limits: MemoryLimits) -> PhasePeak:
    """Replay a trace with `events` in place of its own, and return the memory peaks of the last phase."""
    return replay_trace(replace(trace, events=events), limits).phase_peaks[-1]


def _phases(run: Replay) -> Iterator[tuple[JobPhase, PhasePeak]]:
    """Yield the `JobPhase` and the peaks of each phase of a replay."""
    following = (*run.phase_peaks[1:], None)
    for peak, after in zip(run.phase_peaks, following, strict=True):
        loads_evaluated = peak.phase is Phase.INPUTS and after is not None and after.phase is Phase.EVALUATION
        if peak.phase is Phase.EVALUATION or loads_evaluated:
            yield JobPhase.EVALUATION, peak
        elif peak.phase is Phase.SETUP:
            yield JobPhase.LOADING, peak
        elif peak.phase is Phase.GATHERING:
            yield JobPhase.GATHERING, peak
        elif peak.phase is Phase.END:
            yield JobPhase.SAVING, peak
        else:
            yield JobPhase.FIRST_STEP if peak.step == 1 else JobPhase.LATER_STEPS, peak


def _peak_of(phase: JobPhase, parts: list[PhasePeak]) -> JobPhasePeak:
    if not parts:
        return JobPhasePeak(phase)
    peaks = highest(parts)
    return JobPhasePeak(phase, peaks.allocated_bytes, peaks.reserved_bytes)


def trains(job: Job) -> bool:
    """Return whether a job's mode is TRAIN or STEP."""
    return job.loop.mode in (Mode.TRAIN, Mode.STEP)


def has_plain_weights(job: Job) -> bool:
    """Return whether a job has no FSDP, TP, DeepSpeed, launched ranks or quantization of its weights."""
    return not _is_sharded(job) and job.model.quantize is Quantize.NONE


def _is_sharded(job: Job) -> bool:
    sharding = job.sharding
    return bool(sharding.fsdp or sharding.tp or sharding.world_size or sharding.deepspeed)


def _fsdp_shards(job: Job) -> int:
    """Return the number of FSDP2 shards of each parameter, or 0 without FSDP2.

    Returns 0 also with tensor parallel, shards on the CPU or quantized weights.
    """
    if not job.sharding.fsdp or job.sharding.tp or job.model.quantize is not Quantize.NONE:
        return 0
    arguments = job.sharding.fsdp_arg
    return 0 if arguments.offload else job.sharding.fsdp // arguments.replicas
