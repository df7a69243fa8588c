"""Small traces through the allocator, worked out by hand; random ones for what holds in every replay."""

import pytest
from hypothesis import given, settings, strategies as st

from planner.allocator.config import MIB, AllocatorConfig, MemoryLimits, parse_alloc_conf
from planner.allocator.replay import Failure, Peaks, PhasePeak, Replay, replay_trace, replay_with_breakdown
from planner.allocator.timeline import TimelineRecorder
from planner.errors import UsageError
from planner.program.events import Alloc, Category, Event, Free, Outcome, Phase, PhaseStart, Trace
from planner.program.kernels.convolution import Convolution, Direction
from planner.program.program import AffineAlloc, Program
from tests.helpers.structs import replace
from tests.helpers.traces import SITES, alloc, program_of, programs

# At batch 2: 30 MiB and 12 MiB in segments of their own, 1,024 bytes of a segment of 2 MiB; the last block
# takes the whole of the 12 MiB, as 1 MiB is too little to be split off.
STEP: tuple[Event, ...] = (
    PhaseStart(0, Phase.SETUP),
    Alloc(0, 30 * MIB, Category.PARAMETER, 0),
    PhaseStart(1, Phase.FORWARD),
    AffineAlloc(1, 0, 6 * MIB, Category.ACTIVATION, 1),
    Alloc(2, 1000, Category.WORKSPACE, 2),
    Free(1),
    PhaseStart(1, Phase.BACKWARD),
    Alloc(3, 11 * MIB, Category.GRADIENT, 0),
    PhaseStart(1, Phase.END),
)
JOB = program_of(STEP)

CONVOLUTION = Convolution(
    Direction.FORWARD, "float32", (1, 8, 9, 9), (8, 8, 3, 3), (1, 8, 7, 7), False, (0, 0), (1, 1), (1, 1)
)


def grow_after_free() -> Trace:
    """20 MiB are freed and stay cached, then 22 MiB are requested."""
    return Trace((alloc(0, 20 * MIB), Free(0), alloc(1, 22 * MIB)), SITES, 1)


@pytest.mark.parametrize(("empties_cache", "reserved_mib"), [(False, 42), (True, 22)])
def test_a_free_may_empty_the_cache(empties_cache: bool, reserved_mib: int) -> None:
    """The segment of the freed block goes back to CUDA, so that a larger one is not added to it."""
    trace = Trace((alloc(0, 20 * MIB), Free(0, empties_cache), alloc(1, 22 * MIB)), SITES, 1)
    allocator = replay_trace(trace)
    assert (allocator.peak_reserved_bytes, allocator.retries) == (reserved_mib * MIB, 0)


@pytest.mark.parametrize("capacity_mib", [None, 44])
def test_fits(capacity_mib: int | None) -> None:
    """A job that its capacity just holds fits; the peak's event is the first that reaches it."""
    limits = MemoryLimits(capacity_mib and capacity_mib * MIB)
    assert replay_trace(JOB.instantiate(2), limits) == Replay(
        batch=2,
        outcome=Outcome.FITS,
        peak_allocated_bytes=42 * MIB + 1024,
        peak_reserved_bytes=44 * MIB,
        end_allocated_bytes=42 * MIB + 1024,
        retries=0,
        failure=None,
        peak_event=4,
        phase_peaks=(
            PhasePeak(0, Phase.SETUP, 30 * MIB, 30 * MIB, 30 * MIB),
            PhasePeak(1, Phase.FORWARD, 42 * MIB + 1024, 44 * MIB, 30 * MIB + 1024),
            PhasePeak(1, Phase.BACKWARD, 42 * MIB + 1024, 44 * MIB, 42 * MIB + 1024),
            PhasePeak(1, Phase.END, 42 * MIB + 1024, 44 * MIB, 42 * MIB + 1024),
        ),
    )


@pytest.mark.parametrize(
    ("capacity_mib", "failure", "peak_mib", "peak_event"),
    [
        (43, Failure(1, Phase.FORWARD, "classifier", "aten.addmm", 1000), 42, 3),
        (41, Failure(1, Phase.FORWARD, "features.0", "aten.convolution", 12 * MIB), 30, 1),
        (29, Failure(0, Phase.SETUP, "", "to", 30 * MIB), 0, 0),
    ],
)
def test_does_not_fit(capacity_mib: int, failure: Failure, peak_mib: int, peak_event: int) -> None:
    """A failure states which request could not be served, and the figures stand as they were then."""
    assert replay_trace(JOB.instantiate(2), MemoryLimits(capacity_mib * MIB)) == Replay(
        batch=2,
        outcome=Outcome.DOES_NOT_FIT,
        peak_allocated_bytes=peak_mib * MIB,
        peak_reserved_bytes=peak_mib * MIB,
        end_allocated_bytes=peak_mib * MIB,
        retries=1,
        failure=failure,
        peak_event=peak_event,
        phase_peaks=tuple(
            PhasePeak(step, phase, mib * MIB, mib * MIB, mib * MIB)
            for step, phase, mib in ((0, Phase.SETUP, min(30, peak_mib)), (1, Phase.FORWARD, peak_mib))
            if step <= failure.step
        ),
    )


@pytest.mark.parametrize("limits", [MemoryLimits(41 * MIB), MemoryLimits(100 * MIB, limit_bytes=41 * MIB)])
def test_fits_with_retries(limits: MemoryLimits) -> None:
    """If cached memory has to be released for a request, by capacity or by limit, the batch fits so."""
    assert replay_trace(grow_after_free(), limits) == Replay(
        batch=1,
        outcome=Outcome.FITS_WITH_RETRIES,
        peak_allocated_bytes=22 * MIB,
        peak_reserved_bytes=22 * MIB,
        end_allocated_bytes=22 * MIB,
        retries=1,
        failure=None,
        peak_event=2,
        phase_peaks=(PhasePeak(0, Phase.SETUP, 22 * MIB, 22 * MIB, 22 * MIB),),
    )


@pytest.mark.parametrize(
    ("capacity_mib", "outcome", "peak_mib"),
    [
        (60, Outcome.FITS, 50),
        (49, Outcome.FITS_WITH_RETRIES, 30),
        (29, Outcome.DOES_NOT_FIT, 20),
    ],
)
def test_a_block_that_the_process_does_without(capacity_mib: int, outcome: Outcome, peak_mib: int) -> None:
    """If an optional block is refused and no smaller one is known, the run goes on as if it had no bytes."""
    workspace = Alloc(1, 30 * MIB, Category.WORKSPACE, 1, may_fail=True)
    events = (alloc(0, 20 * MIB), workspace, Free(1), alloc(2, 10 * MIB))
    run = replay_trace(Trace(events, SITES, 1), MemoryLimits(capacity_mib * MIB))
    assert (run.outcome, run.peak_allocated_bytes) == (outcome, peak_mib * MIB)


@pytest.mark.parametrize(("site", "size_mib", "retries"), [(1, 30, 1), (1, 31, 2), (2, 30, 2)])
def test_a_refused_block_is_not_requested_again(site: int, size_mib: int, retries: int) -> None:
    """The plan that was taken instead is kept for its operator and size if no convolution is known."""
    first = Alloc(1, 30 * MIB, Category.WORKSPACE, 1, may_fail=True)
    second = Alloc(2, size_mib * MIB, Category.WORKSPACE, site, may_fail=True)
    events = (alloc(0, 20 * MIB), first, Free(1), second, Free(2))
    assert replay_trace(Trace(events, SITES, 1), MemoryLimits(49 * MIB)).retries == retries


@pytest.mark.parametrize(
    ("room_mib", "taken_mib"), [(50, 30), (49, 24), (44, 24), (43, 12), (32, 12), (31, None)]
)
def test_the_next_engines_that_fit(room_mib: int, taken_mib: int | None) -> None:
    """After a refused workspace come those of the next engines in turn; where none fits, the run fails."""
    workspace = Alloc(1, 30 * MIB, Category.WORKSPACE, 1, may_fail=True)
    events = (alloc(0, 20 * MIB), workspace, Free(1))
    next_engines = {(CONVOLUTION, 30 * MIB): (24 * MIB, 12 * MIB)}
    trace = Trace(
        events,
        SITES,
        1,
        convolutions={1: CONVOLUTION},
        next_workspaces=lambda *refused: next_engines[refused],
    )
    run = replay_trace(trace, MemoryLimits(room_mib * MIB))
    assert run.peak_allocated_bytes == (20 + (taken_mib or 0)) * MIB
    assert (run.outcome is Outcome.DOES_NOT_FIT) == (taken_mib is None)


@pytest.mark.parametrize("is_same", [True, False])
def test_an_engine_is_kept_for_its_convolution(is_same: bool) -> None:
    """Later calls begin with the engine that was taken, though there is room for the first one by then;
    other convolutions of the same size begin with theirs.
    """
    other = CONVOLUTION if is_same else replace(CONVOLUTION, dilation=(2, 2))
    first, second = (Alloc(n, 30 * MIB, Category.WORKSPACE, 1, may_fail=True) for n in (1, 2))
    events = (alloc(0, 20 * MIB), first, Free(1), Free(0), second, Free(2))
    trace = Trace(
        events,
        SITES,
        1,
        convolutions={1: CONVOLUTION, 2: other},
        next_workspaces=lambda *_: (24 * MIB,),
    )
    recorder = TimelineRecorder()
    run = replay_trace(trace, MemoryLimits(49 * MIB), recorder)
    assert run.outcome is Outcome.FITS_WITH_RETRIES
    second_bytes = recorder.timeline().allocated_bytes[4]
    assert second_bytes == (24 if is_same else 30) * MIB


def test_end_is_not_the_peak() -> None:
    """Blocks that are alive at the end of the loop are counted there, apart from the peak."""
    events = (
        PhaseStart(1, Phase.FORWARD),
        alloc(0, 2 * MIB),
        alloc(1, 3 * MIB),
        Free(0),
        PhaseStart(1, Phase.END),
    )
    assert replay_trace(Trace(events, SITES, 8)) == Replay(
        batch=8,
        outcome=Outcome.FITS,
        peak_allocated_bytes=5 * MIB,
        peak_reserved_bytes=20 * MIB,
        end_allocated_bytes=3 * MIB,
        retries=0,
        failure=None,
        peak_event=2,
        phase_peaks=(
            PhasePeak(1, Phase.FORWARD, 5 * MIB, 20 * MIB, 3 * MIB),
            PhasePeak(1, Phase.END, 3 * MIB, 20 * MIB, 3 * MIB),
        ),
    )


def three_steps() -> Trace:
    """30 MiB to begin with; 12 more in the first step, 20 for good made in it, 14 in the second and third."""
    step = lambda number, size: (PhaseStart(number, Phase.FORWARD), alloc(number, size * MIB), Free(number))  # noqa: E731
    events = (
        *(PhaseStart(0, Phase.SETUP), alloc(10, 32 * MIB), Free(10), alloc(0, 30 * MIB)),
        *step(1, 12),
        *(PhaseStart(1, Phase.OPTIMIZER), alloc(4, 20 * MIB)),
        *step(2, 14),
        *step(3, 14),
        PhaseStart(3, Phase.END),
    )
    return Trace(events, SITES, 1)


def test_peaks_of_steps() -> None:
    """Each step has its own peaks, the set-up's counting for the first; cached segments stay reserved."""
    run = replay_trace(three_steps())
    first, later = Peaks(50 * MIB, 64 * MIB), Peaks(64 * MIB, 78 * MIB)
    assert run.step_peaks == (first, later, later)
    assert (run.first_step, run.later_steps) == (first, later)
    assert (run.peak_allocated_bytes, run.peak_reserved_bytes, run.peak_event) == (64 * MIB, 78 * MIB, 10)


def test_peaks_of_steps_that_never_began() -> None:
    """A run that fails in its second step has peaks of two; one that fails in the first has none of later."""
    second = replay_trace(three_steps(), MemoryLimits(64 * MIB))
    assert second.failure == Failure(2, Phase.FORWARD, "", "to", 14 * MIB)
    assert second.step_peaks == (Peaks(50 * MIB, 64 * MIB), Peaks(50 * MIB, 64 * MIB))
    first = replay_trace(three_steps(), MemoryLimits(49 * MIB))
    assert first.failure == Failure(1, Phase.OPTIMIZER, "", "to", 20 * MIB)
    assert (first.first_step, first.later_steps) == (Peaks(42 * MIB, 44 * MIB), None)


def test_a_step_takes_at_least_what_the_one_before_left() -> None:
    """A step without any request peaks at what is there when it begins."""
    events = (
        PhaseStart(1, Phase.FORWARD),
        alloc(0, 30 * MIB),
        alloc(1, 40 * MIB),
        Free(1),
        PhaseStart(2, Phase.FORWARD),
    )
    assert replay_trace(Trace(events, SITES, 1)).later_steps == Peaks(30 * MIB, 70 * MIB)


def test_empty_trace() -> None:
    """A trace without events takes nothing."""
    nothing = Trace((), (), 1)
    peaks = (PhasePeak(0, Phase.SETUP, 0, 0, 0),)
    assert replay_trace(nothing) == Replay(1, Outcome.FITS, 0, 0, 0, 0, None, 0, peaks)
    assert replay_with_breakdown(nothing, MemoryLimits())[1] == dict.fromkeys(Category, 0)


def test_no_samples_no_memory() -> None:
    """A block whose line is at zero for this batch size takes no memory."""
    trace = program_of((alloc(0, -MIB, MIB), alloc(1, 512), Free(0))).instantiate(1)
    peaks = (PhasePeak(0, Phase.SETUP, 512, 2 * MIB, 512),)
    assert replay_trace(trace) == Replay(1, Outcome.FITS, 512, 2 * MIB, 512, 0, None, 1, peaks)


@pytest.mark.parametrize(
    ("conf", "request_mib", "allocated_mib", "reserved_mib"),
    [
        ("", 9, 9, 20),
        ("roundup_power2_divisions:4", 9, 10, 10),
        ("", 30, 30, 30),
        ("expandable_segments:True", 30, 30, 40),
        ("large_segment_size_mb:40", 9, 9, 40),
    ],
)
def test_rules(conf: str, request_mib: int, allocated_mib: int, reserved_mib: int) -> None:
    """The allocator's options reach it."""
    trace = Trace((alloc(0, request_mib * MIB),), SITES, 1)
    run = replay_trace(trace, MemoryLimits(config=parse_alloc_conf(conf)))
    peaks = (PhasePeak(0, Phase.SETUP, allocated_mib * MIB, reserved_mib * MIB, allocated_mib * MIB),)
    assert run == Replay(
        1, Outcome.FITS, allocated_mib * MIB, reserved_mib * MIB, allocated_mib * MIB, 0, None, 0, peaks
    )


def test_fraction_of_the_total() -> None:
    """A fraction in the configuration limits the allocator by the total; without a total it is refused."""
    config = AllocatorConfig(per_process_memory_fraction=0.5)
    trace = grow_after_free()
    outcomes = [
        replay_trace(trace, MemoryLimits(100 * MIB, total_bytes=total_mib * MIB, config=config)).outcome
        for total_mib in (84, 44, 43)
    ]
    assert outcomes == [Outcome.FITS, Outcome.FITS_WITH_RETRIES, Outcome.DOES_NOT_FIT]
    with pytest.raises(UsageError, match="is of the GPU.s memory"):
        replay_trace(trace, MemoryLimits(100 * MIB, config=config))


@pytest.mark.parametrize(
    ("event", "alive"),
    [
        (0, {}),
        (1, {Category.PARAMETER: 30 * MIB}),
        (4, {Category.PARAMETER: 30 * MIB, Category.ACTIVATION: 12 * MIB, Category.WORKSPACE: 1024}),
        (5, {Category.PARAMETER: 30 * MIB, Category.WORKSPACE: 1024}),
        (8, {Category.PARAMETER: 30 * MIB, Category.WORKSPACE: 1024, Category.GRADIENT: 12 * MIB}),
    ],
)
def test_levels(event: int, alive: dict[Category, int]) -> None:
    """The blocks alive after an event count whole, each for its category."""
    recorder = TimelineRecorder()
    replay_trace(JOB.instantiate(2), on_event=recorder)
    levels = {category: column[event] for category, column in recorder.timeline().by_category.items()}
    assert levels == dict.fromkeys(Category, 0) | alive


capacities = st.one_of(st.none(), st.integers(0, 150).map(lambda number: number * MIB))
confs = st.sampled_from(
    ["", "expandable_segments:True", "roundup_power2_divisions:8", "max_split_size_mb:20"]
)


@given(programs(), st.integers(1, 8), capacities, confs)
def test_roles_add_up(program: Program, batch: int, capacity: int | None, conf: str) -> None:
    """Categories add up to the allocated peak at the peak, and to what is allocated at the end there."""
    trace = program.instantiate(batch)
    limits = MemoryLimits(capacity, config=parse_alloc_conf(conf))
    recorder = TimelineRecorder()
    run = replay_trace(trace, limits, recorder)
    _, at_peak = replay_with_breakdown(trace, limits)
    assert sum(at_peak.values()) == run.peak_allocated_bytes
    columns = recorder.timeline().by_category
    if recorder.timeline().allocated_bytes:
        assert at_peak == {category: column[run.peak_event] for category, column in columns.items()}
        assert sum(column[-1] for column in columns.values()) == run.end_allocated_bytes


@given(programs(), st.integers(1, 8), capacities, confs)
def test_bounds(program: Program, batch: int, capacity: int | None, conf: str) -> None:
    """Allocated is at most reserved, the end at most the peak, reserved at most the capacity, and a failure
    comes with a retry.
    """
    trace = program.instantiate(batch)
    run = replay_trace(trace, MemoryLimits(capacity, config=parse_alloc_conf(conf)))
    assert run.end_allocated_bytes <= run.peak_allocated_bytes <= run.peak_reserved_bytes
    assert capacity is None or run.peak_reserved_bytes <= capacity
    assert (run.failure is not None) == (run.outcome is Outcome.DOES_NOT_FIT)
    assert (run.retries > 0) == (run.outcome is not Outcome.FITS)
    assert max(peaks.allocated_bytes for peaks in run.step_peaks) == run.peak_allocated_bytes
    assert max(peaks.reserved_bytes for peaks in run.step_peaks) == run.peak_reserved_bytes


@settings(max_examples=200)
@given(programs(), st.integers(1, 8), capacities, capacities, confs.filter(lambda c: "max_split" not in c))
def test_more_memory_does_no_harm(
    program: Program, batch: int, one: int | None, other: int | None, conf: str
) -> None:
    """A trace that fits without a retry replays the same with more memory.

    Not under max_split_size_mb: there, large cached blocks are released without that being a retry.
    """
    trace = program.instantiate(batch)
    small, large = sorted((one, other), key=lambda capacity: (capacity is None, capacity or 0))
    config = parse_alloc_conf(conf)
    run = replay_trace(trace, MemoryLimits(small, config=config))
    if run.outcome is Outcome.FITS:
        assert replay_trace(trace, MemoryLimits(large, config=config)) == run
