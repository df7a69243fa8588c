"""The plan of jobs whose traces are a known function of the batch size, against brute force; no torch."""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from planner.allocator.config import MIB, AllocatorConfig, MemoryLimits
from planner.allocator.replay import Failure, PhasePeak, Replay, replay_trace
from planner.hardware.budget import Budget, make_budget
from planner.hardware.device import Device, SourcedBytes, generic_device, unlimited_device
from planner.hardware.oom_probability import oom_probability_at
from planner.jobs import Job
from planner.planning.estimate import Answer
from planner.planning.host_memory import HostMemory
from planner.planning.phases import JobPhase, JobPhasePeak
from planner.planning.search.max_batch import Estimate, Plan, Seconds, estimate_batch, find_max_batch
from planner.program import LARGEST_BATCH
from planner.program.events import Alloc, Category, Event, Free, Outcome, Phase, PhaseStart, Trace
from planner.program.extrapolation.fit import fit_traces
from tests.helpers.structs import replace
from tests.helpers.traces import SITES, OneProgram, RunTraces

JOB = Job.create("made up")
Size = Callable[[int], int]  # bytes at a batch size


def budget_of(capacity_mib: int, confidence: float = 0.5, config: AllocatorConfig | None = None) -> Budget:
    """A GPU without uncertainty that leaves so much to the allocator, next to a context of 400 MiB."""
    usable = SourcedBytes((capacity_mib + 400) * MIB, "made up")
    context = SourcedBytes(400 * MIB, "made up")
    return make_budget(
        Device("card", usable, usable, context, (8, 6)), confidence, config or AllocatorConfig()
    )


def steps_of(activation: Size, parameter_bytes: int, batch: int) -> Trace:
    """Two training steps of a layer: parameter, input, activation and workspace, gradient."""
    events: list[Event] = [PhaseStart(0, Phase.SETUP), Alloc(0, parameter_bytes, Category.PARAMETER, 0)]
    for step in (1, 2):
        x, y, scratch, grad = range(10 * step, 10 * step + 4)
        events += [
            PhaseStart(step, Phase.FORWARD),
            Alloc(x, 602_112 * batch, Category.INPUT, 0),
            Alloc(y, activation(batch), Category.ACTIVATION, 1),
            Alloc(scratch, 8_519_680, Category.WORKSPACE, 1),
            Free(scratch),
            PhaseStart(step, Phase.BACKWARD),
            Alloc(grad, parameter_bytes, Category.GRADIENT, 1),
            Free(y),
            Free(x),
            PhaseStart(step, Phase.OPTIMIZER),
            Free(grad),
        ]
    return Trace((*events, PhaseStart(2, Phase.END)), SITES, batch, ("aten.mystery",), ("made up",))


class Steps:
    """The traces of a job, and the batch sizes of which they were requested."""

    def __init__(self, activation: Size, parameter_bytes: int = 30 * MIB) -> None:
        self.activation, self.parameter_bytes = activation, parameter_bytes
        self.batches: list[int] = []

    def at(self, batch: int) -> Trace:
        return steps_of(self.activation, self.parameter_bytes, batch)

    def __call__(self, batch: int) -> Trace:
        self.batches.append(batch)
        return self.at(batch)

    def largest(self, limits: MemoryLimits, most: int) -> int:
        """The largest batch size up to `most` whose own trace fits, by trying all of them."""
        outcomes = {batch: replay_trace(self.at(batch), limits).outcome for batch in range(1, most + 1)}
        return max((b for b, outcome in outcomes.items() if outcome is not Outcome.DOES_NOT_FIT), default=0)


def linear(batch: int) -> int:
    return 5_308_416 * batch


def parabola(batch: int) -> int:
    return 100_000 * batch * batch + 1_000_000 * batch


def assert_identities(result: Estimate) -> None:
    """Assert that figures of an estimate which mean one thing agree."""
    run, context = result.run, result.budget.device.context.value
    assert run.failure is None
    assert set(result.at_peak) == set(Category)
    assert sum(result.at_peak.values()) == run.peak_allocated_bytes
    assert result.process_bytes == context + run.peak_reserved_bytes
    fragmentation_bytes = run.peak_reserved_bytes - run.peak_allocated_bytes
    assert fragmentation_bytes >= 0
    assert context + sum(result.at_peak.values()) + fragmentation_bytes == result.process_bytes
    assert result.process_upper_bytes >= result.process_bytes
    assert (result.failed is not None) == (result.outcome is Outcome.DOES_NOT_FIT)


def without_times(plan: Plan) -> Plan:
    def still(result: Estimate | None) -> Estimate | None:
        return None if result is None else replace(result, seconds=Seconds(0, 0))

    return replace(
        plan,
        at_max=still(plan.at_max),
        at_comfortable=still(plan.at_comfortable),
        first_failure=still(plan.first_failure),
        seconds=Seconds(0, 0),
    )


@settings(max_examples=40)
@given(st.integers(1, 12 * MIB), st.integers(1, 60 * MIB), st.integers(50, 400), st.floats(0.5, 0.999))
def test_largest_by_brute_force(
    slope: int, parameter_bytes: int, capacity_mib: int, confidence: float
) -> None:
    """The plan's batch size fits by its own trace, and no other in reach above it does."""
    tracer = Steps(lambda batch: slope * batch, parameter_bytes)
    budget = budget_of(capacity_mib, confidence)
    plan = find_max_batch(JOB, budget, RunTraces(tracer))
    answer = plan.search.largest
    shown = plan.at_max or plan.first_failure
    assert shown is not None
    assert answer == tracer.largest(shown.budget.limits, answer + 8)
    if plan.at_max is not None:
        assert_identities(plan.at_max)
    assert plan.first_failure is not None
    assert_identities(plan.first_failure)


def test_a_job_with_a_program() -> None:
    """A job that fits to a program is planned from it, and its estimates are those of its traces."""
    tracer = Steps(linear)
    program = fit_traces(tracer.at(2), tracer.at(3))
    plan = find_max_batch(JOB, budget_of(300), OneProgram(program))
    assert plan.search.largest == tracer.largest(MemoryLimits(300 * MIB), 100) == 42  # 30 + 26 + 214 + 30 MiB
    assert plan.search.first_failure == 43
    assert plan.at_max is not None and plan.first_failure is not None
    assert plan.at_max.notes == plan.first_failure.notes == ("made up",)
    assert plan.at_max.unknown_ops == ("aten.mystery",)
    assert plan.at_max.run == replay_trace(tracer.at(42), MemoryLimits(300 * MIB))
    assert plan.first_failure.failed == replay_trace(tracer.at(43), MemoryLimits(300 * MIB))
    assert plan.first_failure.run == replay_trace(tracer.at(43))


def with_workspaces(size: Size, batch: int) -> Trace:
    """Steps with a workspace of so many bytes."""
    taken = steps_of(linear, 30 * MIB, batch)

    def resized(event: Event) -> Event:
        if isinstance(event, Alloc) and event.category is Category.WORKSPACE:
            return msgspec.structs.replace(event, size_bytes=size(batch))
        return event

    return replace(taken, events=tuple(map(resized, taken.events)))


@pytest.mark.parametrize("capacity_mib", range(1000, 1400, 25))
def test_workspaces_that_no_neighbour_predicts(capacity_mib: int) -> None:
    """If scratch memory jumps from each batch size to the next, as cuDNN's may, the answer still fits by its
    own trace, and the batch that is reported to fail does not.
    """

    def jumping(batch: int) -> int:
        return (1 + batch * 2_654_435_761 % 97) * MIB

    tracer = partial(with_workspaces, jumping)
    plan = find_max_batch(JOB, budget_of(capacity_mib), RunTraces(tracer))
    assert plan.at_max is not None and plan.first_failure is not None
    for each, batch in ((plan.at_max, plan.search.largest), (plan.first_failure, plan.search.first_failure)):
        assert batch is not None
        alone = estimate_batch(JOB, tracer(batch), each.budget)
        assert (alone.outcome, alone.run) == (each.outcome, each.run)
    assert plan.at_max.outcome is not Outcome.DOES_NOT_FIT
    assert plan.first_failure.outcome is Outcome.DOES_NOT_FIT


@pytest.mark.parametrize(
    "activation",
    [
        parabola,
        lambda batch: 100_000 * batch * batch,
        lambda batch: 30_000_000 - 1_000_000 * min(batch, 20) + 900_000 * batch,
    ],
    ids=["confirmation", "negative line", "falling line"],
)
def test_job_that_is_no_line(activation: Size) -> None:
    """If sizes are no straight lines, every probe is a run of its own, once."""
    tracer = Steps(activation)
    plan = find_max_batch(JOB, budget_of(300), RunTraces(tracer))
    answer = plan.search.largest
    assert answer == tracer.largest(MemoryLimits(300 * MIB), 3 * answer)
    assert {batch for batch, _ in plan.search.probes} <= set(tracer.batches)
    assert len(tracer.batches) == len(set(tracer.batches))
    assert plan.at_max is not None and plan.first_failure is not None
    assert plan.at_max.run == replay_trace(tracer.at(answer), MemoryLimits(300 * MIB))
    assert_identities(plan.at_max)
    assert_identities(plan.first_failure)


class OtherAtOne(Steps):
    """A job that takes another block at batch 1 than at all others, after its parameter."""

    def __init__(self, activation: Size, at_one_bytes: int, else_bytes: int) -> None:
        super().__init__(activation)
        self.at_one_bytes, self.else_bytes = at_one_bytes, else_bytes

    def at(self, batch: int) -> Trace:
        whole = super().at(batch)
        kind, size = (
            (Category.TEMPORARY, self.at_one_bytes) if batch == 1 else (Category.WORKSPACE, self.else_bytes)
        )
        return replace(whole, events=(*whole.events[:2], Alloc(99, size, kind, 1), *whole.events[2:]))


@pytest.mark.parametrize(
    ("at_one_mib", "else_mib", "capacity_mib", "by_the_line", "answer"),
    [(50, 10, 240, 1, 1), (50, 10, 200, 1, 0), (10, 50, 200, 0, 1), (50, 50, 100, 0, 0)],
)
def test_other_events_at_batch_one(
    at_one_mib: int, else_mib: int, capacity_mib: int, by_the_line: int, answer: int
) -> None:
    """If batch 1 takes other events than 2 and 3, an answer of 1 or 0 is that of its own trace."""
    tracer = OtherAtOne(lambda batch: 100 * MIB * batch, at_one_mib * MIB, else_mib * MIB)
    alike = OtherAtOne(tracer.activation, else_mib * MIB, else_mib * MIB)
    limits = MemoryLimits(capacity_mib * MIB)
    assert (alike.largest(limits, 20), tracer.largest(limits, 20)) == (by_the_line, answer)
    plan = find_max_batch(JOB, budget_of(capacity_mib), RunTraces(tracer))
    assert (plan.search.largest, plan.search.first_failure) == (answer, answer + 1)


def test_nothing_fits() -> None:
    """If not even batch 1 fits, there is no largest batch, and the failure of 1 is reported."""
    plan = find_max_batch(JOB, budget_of(29), RunTraces(Steps(linear)))
    assert (plan.search.largest, plan.search.comfortable, plan.search.first_failure) == (0, 0, 1)
    assert plan.at_max is None
    failed = plan.first_failure and plan.first_failure.failed
    assert failed == Replay(
        batch=1,
        outcome=Outcome.DOES_NOT_FIT,
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        end_allocated_bytes=0,
        retries=1,
        failure=Failure(0, Phase.SETUP, "", "to", 30 * MIB),
        peak_event=0,
        phase_peaks=(PhasePeak(0, Phase.SETUP, 0, 0, 0),),
    )


def test_everything_fits() -> None:
    """On a GPU without end nothing fails, and the largest probed batch size is the answer."""
    tracer = Steps(linear)
    budget = make_budget(unlimited_device(), 0.99, AllocatorConfig())
    plan = find_max_batch(JOB, budget, RunTraces(tracer))
    assert (plan.search.largest, plan.search.first_failure) == (LARGEST_BATCH, None)
    assert plan.first_failure is None
    assert plan.at_max is not None and plan.at_max.outcome is Outcome.FITS
    assert tracer.batches == [2, LARGEST_BATCH]


def test_same_plan_twice() -> None:
    """Planning has no memory: the same job on the same GPU gives the same plan, times aside."""
    one, other = (find_max_batch(JOB, budget_of(300, 0.9), RunTraces(Steps(linear))) for _ in range(2))
    assert without_times(one) == without_times(other)


def test_estimate_by_hand() -> None:
    """An estimate's categories at the peak, in whole blocks, and its process follow from the trace."""
    trace = Trace(
        (
            Alloc(0, 30 * MIB, Category.PARAMETER, 0),
            Alloc(1, 12 * MIB, Category.ACTIVATION, 1),
            Free(1),
            Alloc(2, 11 * MIB, Category.GRADIENT, 0),
        ),
        SITES,
        2,
    )
    budget = budget_of(42)
    result = estimate_batch(JOB, trace, budget, trace_seconds=1.5)
    assert replace(result, seconds=Seconds(1.5, 0)) == Estimate(
        job=JOB,
        budget=budget,
        outcome=Outcome.FITS,
        answer=Answer.FITS,
        limits=budget.likely_limits,
        run=Replay(
            *(2, Outcome.FITS, 42 * MIB, 42 * MIB, 42 * MIB, 0, None, 1),
            (PhasePeak(0, Phase.SETUP, 42 * MIB, 42 * MIB, 42 * MIB),),
        ),
        failed=None,
        at_peak=dict.fromkeys(Category, 0) | {Category.PARAMETER: 30 * MIB, Category.ACTIVATION: 12 * MIB},
        process_bytes=442 * MIB,
        process_upper_bytes=442 * MIB,
        unknown_ops=(),
        notes=(),
        seconds=Seconds(1.5, 0),
        p_out_of_memory=oom_probability_at(budget, 42 * MIB),
        phases=(
            JobPhasePeak(JobPhase.LOADING, 42 * MIB, 42 * MIB),
            *map(JobPhasePeak, (JobPhase.EVALUATION, JobPhase.SAVING, JobPhase.RESUMING)),
        ),
        host=HostMemory(30 * MIB, 0, 30 * MIB, 30 * MIB, 0),
    )
    assert result.seconds.trace == 1.5 and result.seconds.replay > 0


def test_estimate_of_a_failure() -> None:
    """A batch that does not fit is estimated on a GPU without end, next to its failure on this one."""
    budget = budget_of(100)
    trace = Steps(linear).at(40)
    result = estimate_batch(JOB, trace, budget)
    assert result.outcome is Outcome.DOES_NOT_FIT
    assert result.failed == replay_trace(trace, MemoryLimits(100 * MIB))
    assert result.run == replay_trace(trace)
    assert_identities(result)


def test_estimate_with_retries() -> None:
    """A batch that fits with retries is estimated as it runs on this GPU."""
    trace = Trace(
        (Alloc(0, 20 * MIB, Category.INPUT, 0), Free(0), Alloc(1, 22 * MIB, Category.INPUT, 0)),
        SITES,
        1,
    )
    result = estimate_batch(JOB, trace, budget_of(30))
    assert result.outcome is Outcome.FITS_WITH_RETRIES
    assert result.run.peak_reserved_bytes == 22 * MIB
    assert_identities(result)


def test_a_fraction_in_the_rules_does_not_bound_what_a_failed_batch_would_need() -> None:
    """If a batch fails for a configured fraction, its peaks are those of a GPU without any bound."""
    trace = Trace((Alloc(0, 50 * 64 * MIB, Category.INPUT, 0), PhaseStart(1, Phase.END)), SITES, 50)
    config = AllocatorConfig(per_process_memory_fraction=0.1)
    estimate = estimate_batch(Job.create("toy"), trace, make_budget(generic_device(8_000), 0.5, config))
    assert estimate.outcome is Outcome.DOES_NOT_FIT
    assert estimate.run.peak_allocated_bytes == 50 * 64 * MIB
    assert estimate.run.failure is None
