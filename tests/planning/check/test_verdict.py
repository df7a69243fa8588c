"""Verdicts, on a hand-written trace whose memory can be counted."""

import pytest

from planner.allocator import AllocatorConfig
from planner.hardware import EVEN_ODDS, MIB, Budget, make_budget
from planner.hardware.device import Device, FigureKind, SourcedBytes, unlimited_device
from planner.jobs import Job, Loss, TensorSpec
from planner.planning.check import FailOn, Headroom, Judgement, Verdict, judge, largest_that_holds
from planner.planning.estimate import estimate_batch
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace

JOB = Job.create("toy", inputs=(TensorSpec((4,)),), loss=Loss.SUM, steps=1)
NONE = Headroom()
CONTEXT_MIB = 300


def device(usable_mib: int) -> Device:
    """A GPU of so much usable memory, known to 20 MiB."""
    total = SourcedBytes(2 * usable_mib * MIB, "nvidia-smi", kind=FigureKind.PUBLISHED)
    usable = SourcedBytes(usable_mib * MIB, "torch's log", 20 * MIB, FigureKind.PUBLISHED)
    context = SourcedBytes(CONTEXT_MIB * MIB, "one measurement", 0, FigureKind.MEASURED)
    return Device("Card", total, usable, context, (8, 6))


def trace(mib: int, freed_mib: int = 0) -> Trace:
    """One block of so many MiB, after one that has been freed and stays cached."""
    freed = (Alloc(0, freed_mib * MIB, Category.ACTIVATION, 0), Free(0)) if freed_mib else ()
    events = (
        PhaseStart(0, Phase.SETUP),
        PhaseStart(1, Phase.FORWARD),
        *freed,
        Alloc(1, mib * MIB, Category.ACTIVATION, 0),
        Free(1),
        PhaseStart(1, Phase.END),
    )
    return Trace(events, (Site("", "aten.mm.default"),), batch=8)


def verdict(
    mib: int,
    card: Device,
    *,
    freed_mib: int = 0,
    budget_mib: int | None = None,
    headroom: Headroom = NONE,
) -> Judgement:
    events = trace(mib, freed_mib)

    def budget(confidence: float) -> Budget:
        return make_budget(card, confidence, AllocatorConfig())

    budget_bytes = None if budget_mib is None else budget_mib * MIB
    return judge(estimate_batch(JOB, events, budget(0.99)), events, budget(EVEN_ODDS), budget_bytes, headroom)


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (400, Verdict.FITS),
        (740, Verdict.TIGHT),  # 1,040 of 1,100, with a headroom of a tenth
        (796, Verdict.RISKY),  # 1,096 of 1,100, which is known to 20
        (820, Verdict.OUT_OF_MEMORY),
    ],
)
def test_verdicts_on_a_gpu(mib: int, expected: Verdict) -> None:
    """The verdict worsens as the batch comes nearer to the end of the memory."""
    assert verdict(mib, device(1100), headroom=Headroom(share=0.1)).verdict is expected


def test_a_batch_with_retries_is_tight() -> None:
    """A batch for which cached memory has to be released is TIGHT, whatever is left then."""
    judged = verdict(500, device(1100), freed_mib=400)
    assert judged.verdict is Verdict.TIGHT
    assert "retries" in judged.reason


@pytest.mark.parametrize(
    ("budget_mib", "expected"),
    [
        (2000, Verdict.FITS),
        (850, Verdict.TIGHT),
        (600, Verdict.RISKY),  # the context of a GPU that is not known is uncertain
        (300, Verdict.OUT_OF_MEMORY),
    ],
)
def test_a_budget_bounds_the_process_without_a_gpu(budget_mib: int, expected: Verdict) -> None:
    """The context counts against a budget, and what is left is the headroom."""
    card = unlimited_device()
    judged = verdict(200, card, budget_mib=budget_mib, headroom=Headroom(150 * MIB))
    assert judged.verdict is expected
    assert judged.available_bytes == budget_mib * MIB


def test_a_budget_counts_on_no_retries() -> None:
    """A process that would stay below a GPU's end by retries exceeds a budget of the same size."""
    assert verdict(500, device(1100), freed_mib=400).verdict is Verdict.TIGHT
    judged = verdict(500, device(4000), freed_mib=400, budget_mib=1100)
    assert judged.verdict is Verdict.OUT_OF_MEMORY


def test_the_worse_verdict_stands_beside_the_smaller_memory() -> None:
    """Of a GPU and a budget, the one that is exceeded answers."""
    judged = verdict(400, device(1100), budget_mib=600)
    assert (judged.verdict, judged.available_bytes) == (Verdict.OUT_OF_MEMORY, 600 * MIB)
    judged = verdict(900, device(1100), budget_mib=6000)
    assert (judged.verdict, judged.available_bytes) == (Verdict.OUT_OF_MEMORY, 1100 * MIB)


@pytest.mark.parametrize(
    ("fail_on", "refused"),
    [
        (FailOn.TIGHT, ["TIGHT", "RISKY", "OUT OF MEMORY"]),
        (FailOn.RISKY, ["RISKY", "OUT OF MEMORY"]),
        (FailOn.OUT_OF_MEMORY, ["OUT OF MEMORY"]),
    ],
)
def test_what_a_check_fails_on(fail_on: FailOn, refused: list[str]) -> None:
    """A check fails on the verdict that is named and on all that are worse."""
    assert [one for one in Verdict if one.is_no(fail_on)] == refused


@pytest.mark.parametrize("start", [1, 7, 100, 5000])
@pytest.mark.parametrize("limit", [0, 1, 99, 1000])
def test_the_largest_that_holds_is_found_from_anywhere(start: int, limit: int) -> None:
    """The search ends at the largest, wherever it begins."""
    assert largest_that_holds(lambda batch: batch <= limit, start, 1000) == limit
