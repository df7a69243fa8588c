"""A program specialized for another batch size or GPU, against runs of it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from planner.capture.session import record
from planner.capture.symbolic.builder import ProgramBuilder
from planner.capture.symbolic.capability_guards import GuardedCapability
from planner.capture.symbolic.fit_program import fit_program
from planner.capture.symbolic.kernel_calls import RecordedCall, RecordedRun
from planner.jobs import Job, Mode, Optimizer, Precision
from planner.program import NotAffineError, ignore_progress
from planner.program.diff import first_divergence
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from planner.program.pieces import first_step
from planner.program.target import Target
from tests.helpers.models import AMPERE, HOPPER, job_of, on_meta

GA102, TU102, AD102, GH100 = (
    Target.for_capability(capability) for capability in (AMPERE, (7, 5), (8, 9), HOPPER)
)
CAPABILITIES = ((6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


class Attending(nn.Module):
    """Convolution, batch and layer norms, attention: operators with rules of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.BatchNorm2d(64), nn.GELU())
        self.block = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.block(rows).mean(1))


class Forking(nn.Module):
    """Another layer from batch 3 on."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.few(x) if len(x) < 3 else self.many(self.few(x))


def training() -> Job:
    return job_of("3x64x64", mode=Mode.TRAIN, steps=3, optimizer=Optimizer.ADAM)


def builder_of(build: Callable[[], nn.Module], job: Job) -> ProgramBuilder:
    return ProgramBuilder(job, on_meta(build), ignore_progress)


def specialized(builder: ProgramBuilder, batch: int, target: Target) -> Trace:
    trace = builder.programs(target)[0].specialize(batch, target)
    assert trace is not None
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("sm_count", [20, 142])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_program_is_what_a_run_gives(capability: tuple[int, int], sm_count: int) -> None:
    """Program and run are equal, event by event, on any GPU at any batch size but 1, of torch's shortcuts."""
    job = training()
    builder = builder_of(Attending, job)
    builder.programs(GA102)
    target = Target(capability, sm_count)
    for batch in (2, 7, 64, 1000):
        run = record(job, batch, capability, on_meta(Attending), sm_count=sm_count)
        assert first_divergence(specialized(builder, batch, target), run) == ""


def test_workspaces_follow_the_gpu_and_no_line() -> None:
    """The rules are evaluated for every batch size and GPU, where a straight line would be wrong."""
    builder = builder_of(Attending, training())

    def workspaces(batch: int, target: Target) -> list[int]:
        events = specialized(builder, batch, target).events
        return [e.size_bytes for e in events if isinstance(e, Alloc) and e.category is Category.WORKSPACE]

    few, many, hopper = workspaces(2, GA102), workspaces(2000, GA102), workspaces(2000, GH100)
    assert len(few) < len(many)
    assert many != hopper


def test_the_first_step_is_the_beginning() -> None:
    """The first step is the trace up to the start of the second."""
    whole = specialized(builder_of(Attending, training()), 9, GA102)
    first = first_step(whole).events
    assert whole.events[: len(first)] == first
    assert whole.events[len(first)] == PhaseStart(2, Phase.INPUTS)


def test_few_runs_serve_many_gpus() -> None:
    """A model that reads nothing of the compute capability runs three times, for any list of GPUs."""
    builder = builder_of(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        training(),
    )
    programs = {id(builder.programs(Target.for_capability(one))[0]) for one in CAPABILITIES}
    assert len(programs) == 1
    assert builder.runs == 3


def test_gpus_with_other_kernels_have_programs_of_their_own() -> None:
    """In half precision, GPUs before Ampere lack flash attention and Hopper has cuDNN's."""
    job = job_of("3x64x64", mode=Mode.TRAIN, steps=2, precision=Precision.AMP_FP16)
    builder = builder_of(Attending, job)
    ampere, ada, turing, hopper = (builder.programs(target)[0] for target in (GA102, AD102, TU102, GH100))
    assert ampere is ada
    assert len({id(program) for program in (ampere, turing, hopper)}) == 3
    for target in (GA102, AD102, TU102, GH100):
        run = record(job, 33, target.capability, on_meta(Attending), sm_count=target.sm_count)
        assert first_divergence(specialized(builder, 33, target), run) == ""


def test_a_model_that_changes_with_the_batch_has_no_program() -> None:
    """Two runs that diverge give none, and their notes state where."""
    builder = builder_of(Forking, job_of("8", mode=Mode.FORWARD))
    assert builder.programs(GA102) == ()
    assert (
        builder.run(2, GA102)
        .notes[-1]
        .startswith(
            "sizes are no straight line in the batch size, so each probe was traced by itself: event "
        )
    )
    assert builder.runs == 2


def one_run(batch: int, *events: object, sites: tuple[Site, ...] = (Site("", "op"),)) -> RecordedRun:
    return RecordedRun(Trace(tuple(events), sites, batch), ())  # type: ignore[arg-type]


def test_refused_pairs_of_runs() -> None:
    """Sizes that are not affine, sizes that shrink, and frees in another order are refused."""

    def allocated(block: int, size: int) -> Alloc:
        return Alloc(block, size, Category.TEMPORARY, 0)

    pairs = [
        ((allocated(0, 5),), (allocated(0, 8),), 4, "no whole number per sample"),
        ((allocated(0, 8),), (allocated(0, 5),), 3, "no affine size for every batch"),
        (
            (allocated(0, 1), allocated(1, 1), Free(0)),
            (allocated(0, 1), allocated(1, 1), Free(1)),
            3,
            "event 2 is block 0 of op in the loop freed at batch 2",
        ),
    ]
    for first, second, high, message in pairs:
        with pytest.raises(NotAffineError, match=message):
            fit_program([one_run(2, *first), one_run(high, *second)], Job.create("made up"))


def test_where_two_traces_diverge() -> None:
    """The first event that is another one; numbers of blocks do not count."""
    allocated = Alloc(0, 8, Category.TEMPORARY, 0)
    renamed = Alloc(7, 8, Category.TEMPORARY, 0)
    larger = Alloc(0, 9, Category.TEMPORARY, 0)
    one = one_run(2, allocated, Free(0)).trace
    assert first_divergence(one, one_run(2, renamed, Free(7)).trace) == ""
    assert first_divergence(one, one_run(2, larger, Free(0)).trace) == "event 0 at batch 2"
    assert first_divergence(one, one_run(2, allocated).trace) == "the number of events at batch 2"


capabilities = st.tuples(st.integers(5, 13), st.integers(0, 9))


@given(capabilities, capabilities, capabilities)
def test_a_watched_capability_agrees_with_those_that_answer_alike(
    one: tuple[int, int], queried: tuple[int, int], other: tuple[int, int]
) -> None:
    """Guards hold, after any question, for exactly the capabilities that answer it the same."""
    questions: list[Callable[[tuple[int, int]], object]] = [
        lambda c: c == queried,
        lambda c: queried <= c,
        lambda c: c < queried,
        lambda c: c in (queried, (8, 0)),
        lambda c: c[0],
        lambda c: {queried: 1}.get(c),
    ]
    for number, question in enumerate(questions):
        guarded = GuardedCapability(one)
        assert question(guarded) == question(one)
        if number == len(questions) - 1:
            assert guarded.guards_hold(other) == (one == other)  # a table reads the whole value
        elif number != 3:
            assert guarded.guards_hold(other) == (question(one) == question(other))
        elif guarded.guards_hold(other):
            assert question(one) == question(other)
    assert GuardedCapability(one).guards_hold(other)


def test_calls_of_a_run() -> None:
    """Each operator with a rule is noted with the events that it made."""
    calls: list[RecordedCall] = []
    run = record(job_of("8", mode=Mode.FORWARD), 4, AMPERE, on_meta(lambda: nn.Linear(8, 8)), calls=calls)
    products = [call for call in calls if call.func is torch.ops.aten.addmm.default]
    assert [call.site.op for call in products] == ["aten.addmm.default"]
    inside = run.events[products[0].start : products[0].end]
    assert [event.category for event in inside if isinstance(event, Alloc)] == [
        Category.ACTIVATION,
        Category.WORKSPACE,
    ]
