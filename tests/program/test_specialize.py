"""A loop told again for another batch size or GPU, against runs of it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from planner.capture.session import record
from planner.capture.symbolic.builder import Loops
from planner.capture.symbolic.capability_guards import Watched
from planner.capture.symbolic.fit_lines import find_loop
from planner.capture.symbolic.kernel_calls import Calls, Run, UnsteadyError
from planner.capture.symbolic.recast import differs
from planner.jobs import Job, Mode, Optimizer, Precision
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from planner.program.target import Target
from tests.helpers.models import AMPERE, HOPPER, job_of

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


def on_meta(build: Callable[[], nn.Module]) -> Callable[[Job], nn.Module]:
    def built(_: Job) -> nn.Module:
        with torch.device("meta"):
            return build()

    return built


def training() -> Job:
    return job_of("3x64x64", mode=Mode.TRAIN, steps=3, optimizer=Optimizer.ADAM)


def loops_of(build: Callable[[], nn.Module], job: Job) -> Loops:
    return Loops(job, on_meta(build), lambda line: None)


@pytest.mark.parametrize("multiprocessors", [20, 142])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_loop_is_what_a_run_gives(capability: tuple[int, int], multiprocessors: int) -> None:
    """At any batch size but 1, where torch takes shortcuts, on any GPU, event by event."""
    job = training()
    loops = loops_of(Attending, job)
    loops.of(GA102)
    chip = Target(capability, multiprocessors)
    for batch in (2, 7, 64, 1000):
        run = record(job, batch, capability, on_meta(Attending), sm_count=multiprocessors)
        assert differs(loops.at(batch, chip), run) == ""
        assert loops.confirm(batch, chip) == ""


def test_scratch_memory_follows_the_gpu_and_no_line() -> None:
    """What the rules say is asked for every batch size and GPU, where a straight line would be wrong."""
    loops = loops_of(Attending, training())

    def scratch(batch: int, chip: Target) -> list[int]:
        events = loops.at(batch, chip).events
        return [e.fixed_bytes for e in events if isinstance(e, Alloc) and e.role is Category.WORKSPACE]

    few, many, hopper = scratch(2, GA102), scratch(2000, GA102), scratch(2000, GH100)
    assert len(few) < len(many)
    assert many != hopper


def test_placed_and_unplaced() -> None:
    """A loop whose scratch memory is put down to other kernels asks for the same bytes in the same order."""
    loop = loops_of(Attending, training()).of(GA102)

    def asked(one: Trace) -> list[tuple[int, int] | None]:
        return [
            (event.fixed_bytes, event.per_sample_bytes) if isinstance(event, Alloc) else None
            for event in one.events
        ]

    assert asked(loop.at(9, GA102)) == asked(loop.unplaced().at(9, GA102))


def test_the_opening_is_the_beginning() -> None:
    """Up to the mark of the second step."""
    loop = loops_of(Attending, training()).of(GA102)
    whole, opening = loop.at(9, GA102).events, loop.opening_at(9, GA102).events
    assert whole[: len(opening)] == opening
    assert whole[len(opening)] == PhaseStart(2, Phase.INPUTS)


def test_few_runs_serve_many_gpus() -> None:
    """A model that asks nothing of the compute capability runs twice, whatever GPUs are asked for."""
    loops = loops_of(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        training(),
    )
    assert len({id(loops.of(Target.for_capability(capability))) for capability in CAPABILITIES}) == 1
    assert loops.runs == 2


def test_gpus_with_other_kernels_have_loops_of_their_own() -> None:
    """In half precision, GPUs before Ampere lack flash attention and Hopper has cuDNN's."""
    loops = loops_of(Attending, job_of("3x64x64", mode=Mode.TRAIN, steps=2, precision=Precision.AMP_FP16))
    ampere, ada, turing, hopper = (loops.of(chip) for chip in (GA102, AD102, TU102, GH100))
    assert ampere is ada
    assert len({id(loop) for loop in (ampere, turing, hopper)}) == 3
    for chip in (GA102, AD102, TU102, GH100):
        assert loops.confirm(33, chip) == ""


def test_a_model_that_changes_with_the_batch_has_no_loop() -> None:
    """Two runs that part are refused with the place."""
    loops = loops_of(Forking, job_of("8", mode=Mode.FORWARD))
    with pytest.raises(UnsteadyError) as caught:
        loops.of(GA102)
    assert str(caught.value) == "the loop allocates more often at batch 3 than at batch 2"


def one_run(batch: int, *events: object, sites: tuple[Site, ...] = (Site("", "op"),)) -> Run:
    return Run(Trace(tuple(events), sites, (batch,)), ())  # type: ignore[arg-type]


def test_refused_pairs_of_runs() -> None:
    """Sizes on no line of whole bytes, sizes that shrink, and deaths in another order are refused."""

    def birth(block: int, size: int) -> Alloc:
        return Alloc(block, size, 0, Category.TEMPORARY, 0)

    pairs = [
        ((birth(0, 5),), (birth(0, 8),), 4, "on no line through whole numbers"),
        ((birth(0, 8),), (birth(0, 5),), 3, "a block of op shrinks with the batch"),
        (
            (birth(0, 1), birth(1, 1), Free(0)),
            (birth(0, 1), birth(1, 1), Free(1)),
            3,
            "blocks die in another order at batch 2 than at batch 3",
        ),
    ]
    for first, second, high, message in pairs:
        with pytest.raises(UnsteadyError, match=message):
            find_loop(one_run(2, *first), one_run(high, *second))


def test_what_two_traces_differ_in() -> None:
    """The first event that is another one; numbers of blocks do not count."""
    born = Alloc(0, 8, 0, Category.TEMPORARY, 0)
    renamed = Alloc(7, 8, 0, Category.TEMPORARY, 0)
    larger = Alloc(0, 9, 0, Category.TEMPORARY, 0)
    one = one_run(2, born, Free(0)).trace
    assert differs(one, one_run(2, renamed, Free(7)).trace) == ""
    assert differs(one, one_run(2, larger, Free(0)).trace) == "event 0 at batch 2"
    assert differs(one, one_run(2, born).trace) == "the number of events at batch 2"


capabilities = st.tuples(st.integers(5, 13), st.integers(0, 9))


@given(capabilities, capabilities, capabilities)
def test_a_watched_capability_agrees_with_those_that_answer_alike(
    one: tuple[int, int], asked: tuple[int, int], other: tuple[int, int]
) -> None:
    """After any question, exactly those that would have answered it the same."""
    questions: list[Callable[[tuple[int, int]], object]] = [
        lambda c: c == asked,
        lambda c: asked <= c,
        lambda c: c < asked,
        lambda c: c in (asked, (8, 0)),
        lambda c: c[0],
        lambda c: {asked: 1}.get(c),
    ]
    for number, question in enumerate(questions):
        watched = Watched(one)
        assert question(watched) == question(one)
        if number == len(questions) - 1:
            assert watched.agrees(other) == (one == other)  # a table is asked for the whole value
        elif number != 3:
            assert watched.agrees(other) == (question(one) == question(other))
        elif watched.agrees(other):
            assert question(one) == question(other)
    assert Watched(one).agrees(other)


def test_calls_of_a_run() -> None:
    """Each operator with a rule is noted with the events that it made."""
    calls = Calls()
    run = record(job_of("8", mode=Mode.FORWARD), 4, AMPERE, on_meta(lambda: nn.Linear(8, 8)), calls=calls)
    products = [call for call in calls.found if call.func is torch.ops.aten.addmm.default]
    assert [call.site.op for call in products] == ["aten.addmm.default"]
    inside = run.events[products[0].start : products[0].end]
    assert [event.role for event in inside if isinstance(event, Alloc)] == [
        Category.ACTIVATION,
        Category.WORKSPACE,
    ]
