"""Ranks of a job: which are planned, and which of them answers."""

from msgspec.structs import replace

from planner.allocator import AllocatorConfig
from planner.hardware.budget import make_budget
from planner.hardware.device import Device, SourcedBytes
from planner.jobs import Job
from planner.planning import Estimate, estimate_batch, is_worse, ranks_to_plan, with_ranks
from planner.program import Alloc, Category, Fact, Outcome, Phase, PhaseStart, Site, Trace

MIB = 2**20
CARD = make_budget(
    Device("card", *[SourcedBytes(1400 * MIB, "made up")] * 2, SourcedBytes(400 * MIB, "made up"), (8, 6)),
    0.5,
    AllocatorConfig(),
)


def trace(size_bytes: int = MIB, *notes: str) -> Trace:
    """One block in one step."""
    events = (PhaseStart(1, Phase.FORWARD), Alloc(0, size_bytes, Category.ACTIVATION, 0))
    return Trace((*events, PhaseStart(1, Phase.END)), (Site("", "op"),), 4, notes=notes)


def of_file(ranks: int) -> Job:
    """A job of a file's ranks."""
    return Job.create("file.py:Trainer", world_size=ranks)


def estimate(rank: int, size_bytes: int) -> Estimate:
    """The estimate of a rank of three."""
    return estimate_batch(of_file(3).replace(rank=rank), trace(size_bytes), CARD)


def test_ranks_of_equal_parts_are_those_of_the_first() -> None:
    """A trace that says so stands for all ranks."""
    assert ranks_to_plan(of_file(8), replace(trace(), facts=frozenset({Fact.EQUAL_PARTS}))) == ()


def test_all_of_a_few_ranks_are_planned() -> None:
    """Up to eight ranks each is planned, since a file may do anything by its rank."""
    assert ranks_to_plan(of_file(4), trace()) == (1, 2, 3)


def test_of_many_ranks_the_ends_of_dimensions_are_planned() -> None:
    """Of a file's 16 ranks those a power of two from either end are planned; of a sharded model, the last."""
    assert ranks_to_plan(of_file(16), trace()) == (1, 2, 4, 7, 8, 11, 13, 14, 15)
    assert ranks_to_plan(Job.create("made up", fsdp=16), trace()) == (15,)


def test_the_rank_with_the_larger_process_is_worse() -> None:
    """Of ranks that fit, the one that takes more is the answer."""
    assert is_worse(estimate(1, 40 * MIB), estimate(0, 30 * MIB))
    assert not is_worse(estimate(1, 30 * MIB), estimate(0, 30 * MIB))


def test_ranks_of_equal_figures_stand_together() -> None:
    """The answer lists all ranks, those that take the same in one row."""
    by_rank = {0: estimate(0, 30 * MIB), 1: estimate(1, 40 * MIB), 2: estimate(2, 30 * MIB)}
    rows = with_ranks(by_rank[1], by_rank).ranks
    assert [(row.ranks, row.outcome, row.peak_allocated_bytes) for row in rows] == [
        ((0, 2), Outcome.FITS, 30 * MIB),
        ((1,), Outcome.FITS, 40 * MIB),
    ]
