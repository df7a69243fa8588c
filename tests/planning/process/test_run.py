"""Processes over hand-made traces: literal steps in, what they print out; and which make no sense."""

from collections.abc import Iterator

import pytest
import torch

from planner.allocator.config import MemoryLimits
from planner.allocator.replay import replay_trace
from planner.errors import ModelError
from planner.jobs import Job, Mode, TensorSpec, ZeroGrad, parse_tensor_spec
from planner.jobs.parse import DTYPES
from planner.planning.process.model import (
    ITEM_BYTES,
    Define,
    Delete,
    EmptyCache,
    Heading,
    InvalidStep,
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
from planner.planning.process.run import run_process
from planner.program.events import Alloc, Category, Event, Free, Outcome, Phase, PhaseStart, Trace
from tests.helpers.models import MIB
from tests.helpers.traces import SITES

BATCH = 4
JOB = Job.create("hand-made")
NET = Model("net", JOB, BATCH)
OTHER = Model("other", JOB, BATCH)

# What the hand-made model takes, in MiB. From 10 MiB on, each block has a segment of its own, and from sizes
# that differ by 2 MiB and more, what is too much is split off.
WEIGHT = 30
INPUT = 12
OUTPUT = 14  # in training; lives, like the input, until the next one is there
HIDDEN = 16  # in training it dies in the backward pass, in eval mode right after its birth
WORKSPACES = 10 + 18  # cuBLAS's of the two threads


def events_of_training(steps: int, zero_grad: ZeroGrad, growth: int = 0) -> Iterator[Event]:
    """Set-up and steps; block 10 * step + k is the k-th of a step. With `growth`, outputs grow each step."""
    yield PhaseStart(0, Phase.SETUP)
    yield Alloc(0, WEIGHT * MIB, Category.PARAMETER, 0)
    for step in range(1, steps + 1):
        here, before = 10 * step, 10 * (step - 1)
        yield PhaseStart(step, Phase.INPUTS)
        yield from [Free(before + 1)] if step > 1 else []
        yield Alloc(here + 1, INPUT * MIB, Category.INPUT, 0)
        yield PhaseStart(step, Phase.FORWARD)
        yield from [Free(before + 4)] if step > 1 and zero_grad is ZeroGrad.BEFORE_FORWARD else []
        yield Alloc(here + 2, HIDDEN * MIB, Category.ACTIVATION, 0)
        yield from [Alloc(5, 10 * MIB, Category.WORKSPACE, 0)] if step == 1 else []
        yield Alloc(here + 3, (OUTPUT + growth * step) * MIB, Category.ACTIVATION, 0)
        yield from [Free(before + 3)] if step > 1 else []
        yield PhaseStart(step, Phase.BACKWARD)
        yield from [Free(before + 4)] if step > 1 and zero_grad is ZeroGrad.BEFORE_BACKWARD else []
        yield from [Alloc(6, 18 * MIB, Category.WORKSPACE, 0)] if step == 1 else []
        yield Alloc(here + 4, WEIGHT * MIB, Category.GRADIENT, 0)
        yield Free(here + 2)
        yield PhaseStart(step, Phase.OPTIMIZER)
        yield from [Free(here + 4)] if zero_grad is ZeroGrad.AFTER_STEP else []
    yield PhaseStart(steps, Phase.END)


INFERENCE = (
    PhaseStart(0, Phase.SETUP),
    Alloc(0, WEIGHT * MIB, Category.PARAMETER, 0),
    PhaseStart(1, Phase.INPUTS),
    Alloc(1, INPUT * MIB, Category.INPUT, 0),
    PhaseStart(1, Phase.FORWARD),
    Alloc(2, HIDDEN * MIB, Category.TEMPORARY, 0),
    Alloc(5, 10 * MIB, Category.WORKSPACE, 0),
    Free(2),
    Alloc(3, OUTPUT * MIB, Category.TEMPORARY, 0),
    PhaseStart(1, Phase.END),
)


def tracer(job: Job, batch: int) -> Trace:
    """The hand-made model, whatever the job is called."""
    assert batch == BATCH
    infers = job.loop.mode is Mode.INFER
    events = INFERENCE if infers else tuple(events_of_training(job.loop.steps, job.loop.zero_grad))
    return Trace(tuple(events), SITES, batch)


def growing(job: Job, batch: int) -> Trace:
    """A loop that never settles."""
    return Trace(tuple(events_of_training(job.loop.steps, job.loop.zero_grad, growth=2)), SITES, batch)


def mib_after(*steps: Step) -> tuple[float, ...]:
    """Allocated, reserved and peak MiB at the end of a process."""
    reading = run_process((*steps, Print("end")), tracer).readings[-1]
    assert reading.reserved_bytes is not None
    return (reading.allocated_bytes / MIB, reading.reserved_bytes / MIB, reading.peak_allocated_bytes / MIB)


def tensor(name: str, mib: int) -> Define:
    """A tensor of so many MiB."""
    return Define(name, TensorSpec((mib, MIB), "uint8"))


def training(model: Model = NET, epochs: int = 1) -> Train:
    """Three steps an epoch."""
    return Train(model, BATCH, 3, epochs, "Train")


# ---- tensors, cache and counters


def test_the_notebooks_variable() -> None:
    """Defined, deleted, released: what the notebook prints for its tensor of 1 GiB."""
    process: Process = (
        Heading("Tensor variable"),
        ResetPeak(),
        Print("Initial"),
        Define("var_gpu", parse_tensor_spec("268435456")),
        Print("Define"),
        Delete(("var_gpu",)),
        Print("Delete"),
        EmptyCache(),
        Print("Release"),
    )
    gib = 2**30
    assert run_process(process, tracer) == ProcessLog(
        readings=(
            MemoryReading("Tensor variable", "Initial", 0, 0, 0),
            MemoryReading("Tensor variable", "Define", gib, gib, gib),
            MemoryReading("Tensor variable", "Delete", 0, gib, gib),
            MemoryReading("Tensor variable", "Release", 0, 0, gib),
        ),
        retries=0,
        failure=None,
    )


def test_a_name_lets_go_once_the_new_tensor_is_there() -> None:
    """Binding a name again needs room for both tensors."""
    assert mib_after(tensor("x", 20), tensor("x", 30)) == (30, 50, 50)


def test_the_peak_starts_anew_from_what_is_held() -> None:
    """After a reset the peak is what is allocated, and rises from there."""
    assert mib_after(tensor("x", 20), tensor("y", 30), Delete(("x",)), ResetPeak()) == (30, 50, 30)


def test_deleted_names_leave_their_blocks_in_the_cache() -> None:
    """A tensor takes the cached block of one that was deleted."""
    assert mib_after(tensor("x", 20), tensor("y", 30), Delete(("x", "y")), tensor("z", 20)) == (20, 50, 50)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_as_large_as_torchs(dtype: str) -> None:
    """A tensor of each dtype takes as many bytes as in torch."""
    item_bytes = getattr(torch, dtype).itemsize
    assert (ITEM_BYTES[dtype], size_bytes(TensorSpec((3, 5), dtype))) == (item_bytes, 15 * item_bytes)


def test_a_scalar_is_one_element() -> None:
    """A tensor without dimensions takes the bytes of one element."""
    assert size_bytes(parse_tensor_spec("scalar:int64")) == 8


# ---- models


def test_a_model_is_placed_once() -> None:
    """Placing takes the weights, and nothing the second time."""
    assert mib_after(Place(NET)) == mib_after(Place(NET), Place(NET)) == (30, 30, 30)


def test_two_models_of_one_job_are_two() -> None:
    """A model under another name has weights of its own."""
    assert mib_after(Place(NET), Place(OTHER)) == (60, 60, 60)


def test_summary_leaves_the_model_and_the_workspace() -> None:
    """After a summary its input and output are gone; the model and cuBLAS's workspace stay."""
    allocated, _, peak = mib_after(Summary(NET, BATCH))
    assert (allocated, peak) == (WEIGHT + 10, WEIGHT + INPUT + 10 + HIDDEN)


def test_summary_makes_the_input_before_it_moves_the_model() -> None:
    """A limit with room for the input only fails at a weight of the model."""
    log = run_process((Summary(NET, BATCH),), tracer, MemoryLimits(limit_bytes=20 * MIB))
    assert log.failure == OutOfMemory(0, 1, Phase.FORWARD, WEIGHT * MIB)


def test_a_second_summary_takes_nothing_more() -> None:
    """Summaries find the model in its place and all their blocks in the cache."""
    assert mib_after(Summary(NET, BATCH), Summary(NET, BATCH)) == mib_after(Summary(NET, BATCH))


def test_training_is_the_replay_of_its_trace() -> None:
    """A model placed and trained for the steps of a trace prints the figures of the replay of the trace."""
    alone = replay_trace(tracer(JOB.replace(steps=3), BATCH))
    reading = run_process((Place(NET), training()), tracer).readings[-1]
    assert alone.outcome is Outcome.FITS
    assert reading == MemoryReading(
        "", "Train", alone.end_allocated_bytes, alone.peak_reserved_bytes, alone.peak_allocated_bytes
    )


@pytest.mark.parametrize("zero_grad", ZeroGrad)
def test_repeated_steps_are_traced_ones(zero_grad: ZeroGrad) -> None:
    """Four epochs print the figures of the replay of a trace of all their steps."""
    job = JOB.replace(zero_grad=zero_grad)
    alone = replay_trace(tracer(job.replace(steps=12), BATCH))
    model = Model("net", job, BATCH)
    readings = run_process((Place(model), training(model, epochs=4)), tracer).readings
    assert [reading.label for reading in readings] == ["Train"] * 4
    assert readings[-1].allocated_bytes == alone.end_allocated_bytes
    assert readings[-1].reserved_bytes == alone.peak_reserved_bytes
    assert readings[-1].peak_allocated_bytes == alone.peak_allocated_bytes


def test_epochs_without_a_label_print_nothing() -> None:
    """Figures are read after each epoch only where the process prints them."""
    assert run_process((Place(NET), Train(NET, BATCH, 3, 2)), tracer).readings == ()


def test_a_loop_that_does_not_settle_is_traced_to_its_end() -> None:
    """All steps count if each differs: the sixth output is 12 MiB larger than a first one."""
    process: Process = (Place(NET), Train(NET, BATCH, 2, 3), Print("Final"))
    held = WEIGHT + INPUT + OUTPUT + 12 + WEIGHT + WORKSPACES
    assert run_process(process, growing).readings[-1].allocated_bytes == held * MIB


def test_a_long_loop_that_does_not_settle_is_refused() -> None:
    """More than 100 steps that all differ are an error with a remedy."""
    with pytest.raises(
        ModelError, match="hand-made: its steps differ .* 101 are too many; train at most 100"
    ):
        run_process((Place(NET), Train(NET, BATCH, 101, 1)), growing)


def test_leaving_keeps_weights_and_gradients() -> None:
    """When the function returns, input and output die; the model stays with its gradients."""
    assert mib_after(Place(NET), training())[0] == WEIGHT + INPUT + OUTPUT + WEIGHT + WORKSPACES
    assert mib_after(Place(NET), training(), Leave())[0] == WEIGHT + WEIGHT + WORKSPACES


def test_workspaces_are_taken_once_for_a_process() -> None:
    """A second model that is trained finds the workspaces of both threads."""
    each = (Place(NET), training(), Leave()), (Place(OTHER), training(OTHER), Leave())
    assert mib_after(*each[0], *each[1])[0] == 4 * WEIGHT + WORKSPACES


def test_the_backward_passs_workspace_is_not_the_forward_passs() -> None:
    """After a summary, training takes the workspace of autograd's thread only."""
    alone, after = (mib_after(*steps, Place(NET), training())[0] for steps in ((), (Summary(OTHER, BATCH),)))
    assert after == alone + WEIGHT


@pytest.mark.parametrize("zero_grad", ZeroGrad)
def test_gradients_are_never_there_twice(zero_grad: ZeroGrad) -> None:
    """A second loop peaks as the first does."""
    model = Model("net", JOB.replace(zero_grad=zero_grad), BATCH)
    once = Train(model, BATCH, 1, 1)
    peak_mib = WEIGHT + INPUT + HIDDEN + OUTPUT + WEIGHT + WORKSPACES
    assert mib_after(Place(model), once, Leave(), ResetPeak(), once)[2] == peak_mib


@pytest.mark.parametrize(
    ("zero_grad", "phase", "requested_mib"),
    [
        # The room of the gradients goes to the forward pass, and none is left for new gradients.
        (ZeroGrad.BEFORE_FORWARD, Phase.BACKWARD, WEIGHT),
        (ZeroGrad.BEFORE_BACKWARD, Phase.FORWARD, HIDDEN),
    ],
)
def test_old_gradients_go_where_the_loop_sets_them_to_none(
    zero_grad: ZeroGrad, phase: Phase, requested_mib: int
) -> None:
    """In a second loop that starts with room for its input alone, more comes free in that phase."""
    model = Model("net", JOB.replace(zero_grad=zero_grad), BATCH)
    once = Train(model, BATCH, 1, 1)
    steps = (Place(model), once, Leave(), EmptyCache())
    held = 2 * WEIGHT + WORKSPACES
    filler = tensor("x", 200 - held - INPUT)
    log = run_process((*steps, filler, once), tracer, MemoryLimits(limit_bytes=200 * MIB))
    assert log.failure == OutOfMemory(5, 1, phase, requested_mib * MIB)


def test_a_summary_leaves_gradients_alone() -> None:
    """torchinfo after training frees no gradients."""
    trained = (Place(NET), training(), Leave())
    assert mib_after(*trained, Summary(NET, BATCH))[0] == mib_after(*trained)[0]


def test_a_replaced_buffer_comes_back() -> None:
    """A weight that a loop gives back is requested again by the next loop of its model."""

    def replacing(job: Job, batch: int) -> Trace:
        events = (
            *(PhaseStart(0, Phase.SETUP), Alloc(0, 30 * MIB, Category.PARAMETER, 0)),
            *(
                Alloc(1, 10 * MIB, Category.PARAMETER, 0),
                PhaseStart(1, Phase.INPUTS),
                PhaseStart(1, Phase.FORWARD),
            ),
            *(Alloc(2, 10 * MIB, Category.TEMPORARY, 0), Free(1), PhaseStart(1, Phase.END)),
        )
        return Trace(events, SITES, batch)

    def allocated(*steps: Step) -> int:
        return run_process((*steps, Print("")), replacing).readings[-1].allocated_bytes // MIB

    assert allocated(Summary(NET, BATCH)) == 30
    assert allocated(Summary(NET, BATCH), Place(NET)) == 40


def test_optimizer_state_of_the_setup_dies_with_the_loop() -> None:
    """State that an optimizer makes when it is built belongs to the loop, not to the model."""

    def adagrad(job: Job, batch: int) -> Trace:
        setup, parameter, *steps = events_of_training(job.loop.steps, job.loop.zero_grad)
        state = Alloc(1, 30 * MIB, Category.OPTIMIZER, 0)
        return Trace((setup, parameter, state, *steps), SITES, batch)

    def allocated(*steps: Step) -> int:
        return run_process((*steps, Print("")), adagrad).readings[-1].allocated_bytes // MIB

    assert allocated(Place(NET)) == WEIGHT
    assert allocated(Place(NET), training()) == WEIGHT + 30 + INPUT + OUTPUT + WEIGHT + WORKSPACES
    assert allocated(Place(NET), training(), Leave()) == WEIGHT + WEIGHT + WORKSPACES


@pytest.mark.parametrize(
    "steps",
    [
        (tensor("x", 5), Place(NET), Delete(("x", "net"))),
        (Place(NET), training(), Leave(), Delete(("net",))),
        (
            Summary(NET, BATCH),
            Place(OTHER),
            training(OTHER),
            Leave(),
            training(),
            Leave(),
            Delete(("net", "other")),
        ),
    ],
)
def test_nothing_is_left_but_workspaces(steps: tuple[Step, ...]) -> None:
    """After everything is deleted and the cache emptied, the workspaces are all that is held."""
    multiplied = any(isinstance(step, Train) for step in steps)
    allocated, reserved, _ = mib_after(*steps, EmptyCache())
    assert allocated == (WORKSPACES if multiplied else 0)
    assert (reserved > 0) == multiplied  # a workspace in a larger cached block keeps the whole segment


# ---- how a process ends


def test_memory_runs_out() -> None:
    """A process ends at the request that cannot be served, and keeps what it printed until then."""
    process: Process = (tensor("x", 20), Print("x"), tensor("y", 30), Print("y"))
    assert run_process(process, tracer, MemoryLimits(limit_bytes=40 * MIB)) == ProcessLog(
        readings=(MemoryReading("", "x", 20 * MIB, 20 * MIB, 20 * MIB),),
        retries=1,
        failure=OutOfMemory(2, None, None, 30 * MIB),
    )


@pytest.mark.parametrize(
    ("steps", "limit_mib", "failure"),
    [
        ((Place(NET),), 20, OutOfMemory(0, 0, Phase.SETUP, WEIGHT * MIB)),
        ((Place(NET), training()), 80, OutOfMemory(1, 1, Phase.FORWARD, OUTPUT * MIB)),
        ((Place(NET), training()), 110, OutOfMemory(1, 1, Phase.BACKWARD, WEIGHT * MIB)),
        ((Place(NET), training(), tensor("x", 190)), 200, OutOfMemory(2, None, None, 190 * MIB)),
    ],
)
def test_where_memory_runs_out(steps: Process, limit_mib: int, failure: OutOfMemory) -> None:
    """A failure names the step, the loop's own step and its phase, and the requested bytes."""
    assert run_process(steps, tracer, MemoryLimits(limit_bytes=limit_mib * MIB)).failure == failure


def test_cached_memory_is_released_on_the_way() -> None:
    """A deleted tensor's block that stands in the way is given back to CUDA, which counts as a retry."""
    process: Process = (tensor("x", 20), Delete(("x",)), tensor("y", 30), Print("y"))
    log = run_process(process, tracer, MemoryLimits(limit_bytes=40 * MIB))
    assert (log.retries, log.failure) == (1, None)
    assert log.readings == (MemoryReading("", "y", 30 * MIB, 30 * MIB, 30 * MIB),)


# ---- processes that make no sense

GRADS_KEPT = Model("net", JOB.replace(keep_grads=True), BATCH)
INFERRING = Model("net", JOB.replace(mode=Mode.INFER), BATCH)


@pytest.mark.parametrize(
    ("process", "flaw"),
    [
        (
            (Delete(("x",)),),
            InvalidStep(0, "nothing on the GPU is named x here; define a tensor or place a model first"),
        ),
        (
            (tensor("x", 1), Delete(("x", "x"))),
            InvalidStep(1, "nothing on the GPU is named x here; define a tensor or place a model first"),
        ),
        ((training(),), InvalidStep(0, "net is not on the GPU; place it first")),
        ((Leave(),), InvalidStep(0, "there is no loop to leave; train first")),
        (
            (Place(NET), training(), Leave(), Leave()),
            InvalidStep(3, "there is no loop to leave; train first"),
        ),
        (
            (Place(NET), training(), training()),
            InvalidStep(2, "the names of the loop before, of net, still live; leave it first"),
        ),
        (
            (Place(NET), training(), Delete(("net",))),
            InvalidStep(2, "net is held by its loop's optimizer; leave the loop first"),
        ),
        (
            (Place(NET), Delete(("net",)), Summary(NET, BATCH)),
            InvalidStep(2, "net was deleted; give another model of the same job a name of its own"),
        ),
        ((Place(NET), tensor("net", 1)), InvalidStep(1, "net is a model; take another name for the tensor")),
        ((tensor("net", 1), Place(NET)), InvalidStep(1, "net is a tensor; take another name for the model")),
        ((Place(NET), Place(INFERRING)), InvalidStep(1, "net is another model already; take another name")),
        (
            (Place(INFERRING), training(INFERRING)),
            InvalidStep(1, "hand-made is a job of mode infer; only mode train can be trained"),
        ),
        (
            (Place(GRADS_KEPT), training(GRADS_KEPT), Leave(), training(GRADS_KEPT)),
            InvalidStep(3, "net was trained before and its gradients were kept; that is not modelled"),
        ),
    ],
)
def test_flaws(process: Process, flaw: InvalidStep) -> None:
    """The first step that makes no sense is named with its reason, and such a process does not run."""
    assert find_invalid_step(process) == flaw
    with pytest.raises(ValueError, match=f"step {flaw.index}: "):
        run_process(process, tracer)


def test_a_process_without_flaw() -> None:
    """Names may be used again once they are free, models trained again once their loop is left."""
    process: Process = (
        *(tensor("x", 1), tensor("x", 2), Delete(("x",)), tensor("x", 1)),
        *(Summary(NET, BATCH), training(), Summary(OTHER, BATCH), Leave(), training(), Leave()),
        *(Delete(("net", "x")), Heading("end"), EmptyCache(), ResetPeak(), Print("end")),
    )
    assert find_invalid_step(process) is None
