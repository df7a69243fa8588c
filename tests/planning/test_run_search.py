"""The largest batch sizes where each trace is a run of the model, as of compiled models."""

from functools import partial

import pytest

from planner.allocator.config import MIB, MemoryLimits
from planner.allocator.replay import replay_trace
from planner.planning.search.by_runs import search_by_runs
from planner.planning.search.replays import ReplayCache, TargetReplays
from planner.program.events import Alloc, Category, Event, Free, Outcome, Phase, PhaseStart, Trace
from planner.program.kernels.convolution import Convolution, ConvWorkspace, Direction, Workspaces
from tests.helpers.structs import replace
from tests.helpers.traces import GA102, SITES, RunTraces

MOST = 2**20


def step(batch: int, padded: int = 0, workspace: int = 0) -> Trace:
    """A step: a parameter, activations of 5 MiB a sample, and temporaries that this batch size alone has."""
    temporaries: list[Event] = []
    for block in range(10, 10 + padded):
        temporaries += [Alloc(block, 2 * MIB * batch, Category.TEMPORARY, 0)]
    temporaries += [Free(block) for block in range(10, 10 + padded)]
    scratch = [Alloc(3, workspace, Category.WORKSPACE, 1), Free(3)] if workspace else []
    events = (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 30 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
        Alloc(1, 2 * MIB * batch, Category.INPUT, 0),
        Alloc(2, 3 * MIB * batch + 512 * (batch % 7), Category.ACTIVATION, 1),
        *scratch,
        *temporaries,
        Free(2),
        Free(1),
        PhaseStart(1, Phase.END),
    )
    return Trace(events, SITES, batch)


def found(runs: RunTraces, capacity_mib: int, *, is_compiled: bool = True) -> tuple[int, int]:
    """Return the answers: of any batch size, and of those without retries."""
    replays = TargetReplays(ReplayCache(runs), GA102, None, MOST, is_compiled)
    search = search_by_runs(replays, (MemoryLimits(capacity_mib * MIB),))
    assert {size for size, _ in search.probes} == set(runs.taken)
    return search.largest, search.comfortable


def exhaustive(runs: RunTraces, capacity_mib: int, most: int, *outcomes: Outcome) -> int:
    """Return the largest batch size with such an outcome, by a run of each."""
    limits = MemoryLimits(capacity_mib * MIB)
    sizes = range(most, 0, -1)
    return next((size for size in sizes if replay_trace(runs.run(size), limits).outcome in outcomes), 0)


def is_as_exhaustive(runs: RunTraces, capacity_mib: int, *, is_compiled: bool = True) -> bool:
    """Return whether both answers are those of a run of each batch size."""
    any_outcome = (Outcome.FITS, Outcome.FITS_WITH_RETRIES)
    most = capacity_mib // 2
    expected = (
        exhaustive(runs, capacity_mib, most, *any_outcome),
        exhaustive(runs, capacity_mib, most, Outcome.FITS),
    )
    return found(runs, capacity_mib, is_compiled=is_compiled) == expected


@pytest.mark.parametrize("capacity_mib", [34, 60, 333, 1000, 4321])
def test_few_runs_lead_to_the_answer_of_all(capacity_mib: int) -> None:
    """Sizes that are nearly affine are found in five runs at most, from far away too."""
    runs = RunTraces(step)
    assert is_as_exhaustive(runs, capacity_mib)
    assert len(runs.taken) <= 5


def test_large_compiled_batch_sizes_are_multiples_of_eight() -> None:
    """Those beside them are not run, which without a compiler they are."""
    runs = RunTraces(step)
    largest, _ = found(runs, 12_345)
    assert set(runs.taken) == {size for size in runs.taken if size % 8 == 0}
    assert is_as_exhaustive(RunTraces(step), 12_345, is_compiled=False)
    most = exhaustive(runs, 12_345, 12_345 // 2, Outcome.FITS, Outcome.FITS_WITH_RETRIES)
    assert largest == most - most % 8


def aligned(most: int, batch: int) -> Trace:
    """A step with `most` temporaries more where the batch size is no multiple of eight, as while padding is
    timed.
    """
    return step(batch, most if batch % 8 else 0)


@pytest.mark.parametrize("capacity_mib", [333, 1000, 4321])
def test_batch_sizes_that_need_no_padding_are_seen_beyond_others(capacity_mib: int) -> None:
    """With padding every size beside the multiples of eight fails long before the answer."""
    runs = RunTraces(partial(aligned, 2))
    assert is_as_exhaustive(runs, capacity_mib)
    largest, _ = found(runs, capacity_mib)
    assert largest % 8 == 0
    assert len(runs.taken) <= 7


def renamed(batch: int) -> Trace:
    """A step whose operators have names of this batch size alone, so that no two traces fit."""
    taken = step(batch)
    return replace(taken, sites=tuple(replace(site, op=f"{site.op}_{batch}") for site in taken.sites))


def test_the_answer_ran() -> None:
    """Whatever sizes do, nothing that was not run is answered."""
    runs = RunTraces(lambda batch: step(batch, batch * 2_654_435_761 % 3))
    largest, comfortable = found(runs, 2000)
    assert {largest, comfortable} <= set(runs.taken)
    assert replay_trace(runs.run(largest), MemoryLimits(2000 * MIB)).outcome is not Outcome.DOES_NOT_FIT


def test_the_batch_sizes_after_the_answers_ran() -> None:
    """Without a compiler, which makes runs dear, the next batch sizes are seen not to fit."""
    runs = RunTraces(step)
    largest, comfortable = found(runs, 1000, is_compiled=False)
    assert {largest, largest + 1, comfortable, comfortable + 1} <= set(runs.taken)


def test_traces_that_fit_to_no_program_lead_on() -> None:
    """The trace of the answer, its tensors in proportion, rules out the next batch size."""
    unalike, alike = RunTraces(renamed), RunTraces(step)
    answers = found(unalike, 1000)
    assert found(alike, 1000) == answers
    assert is_as_exhaustive(unalike, 1000)
    assert len(unalike.taken) <= 5


def looping(batch: int) -> Trace:
    """A step that makes a small tensor for each sample, so that no two traces have the same events, and has
    much that does not depend on the batch size.
    """
    taken = step(batch)
    losses = [Alloc(100 + sample, 512, Category.TEMPORARY, 1) for sample in range(batch)]
    fixed = Alloc(50, 200 * MIB, Category.TEMPORARY, 0)
    end = len(taken.events) - 3
    return replace(taken, events=(*taken.events[:end], fixed, *losses, *taken.events[end:]))


def test_steps_that_loop_over_samples_are_estimated_by_two_runs() -> None:
    """Their traces fit to no program, yet what does not grow with the batch is seen not to."""
    runs = RunTraces(looping)
    assert is_as_exhaustive(runs, 1000, is_compiled=False)
    assert len(runs.taken) <= 5


def test_workspaces_of_other_batch_sizes_are_asked_for() -> None:
    """A workspace that jumps far below the answer is no surprise, since the library answers for any size."""
    jump = 150

    def answered(convolution: Convolution) -> Workspaces:
        return Workspaces(800 * MIB if convolution.x[0] >= jump else MIB)

    def run(batch: int) -> Trace:
        shape = (batch, 3, 8, 8)
        convolution = Convolution(
            Direction.FORWARD, "float32", shape, (3, 3, 1, 1), shape, False, (0, 0), (1, 1), (1, 1)
        )
        size = answered(convolution).workspace_bytes
        row = ConvWorkspace.from_query(3, convolution, None, searched=False)
        taken = step(batch, workspace=size)
        return replace(taken, conv_workspaces=(row,), workspaces_of=answered)

    runs = RunTraces(run)
    assert found(runs, 1000)[0] == jump - 1
    assert len(runs.taken) <= 6


def in_parts(batch: int) -> Trace:
    """Return a step that works through its batch one sample at a time, whose memory is that of one sample."""
    parts: list[Event] = []
    for block in range(1, batch + 1):
        parts += [Alloc(block, MIB, Category.INPUT, 0), Free(block)]
    return Trace((PhaseStart(1, Phase.FORWARD), *parts, PhaseStart(1, Phase.END)), SITES, batch)


def test_a_loop_over_the_batch_is_searched_as_far_as_its_traces_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("planner.planning.search.by_runs._MOST_EVENTS", 10_000)
    runs = RunTraces(in_parts)
    replays = TargetReplays(ReplayCache(runs), GA102, None, MOST)
    search = search_by_runs(replays, (MemoryLimits(100 * MIB),))
    assert search.largest == search.comfortable == 4_999  # two events each, and two starts of phases
    assert max(runs.taken) == 4_999
    assert list(replays.too_large) == [5_000]
