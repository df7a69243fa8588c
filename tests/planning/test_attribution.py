"""Attribution of memory: sums that equal the replay's, literal traces, the timeline and its picture."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, strategies as st

from planner.allocator.config import MIB, UNLIMITED, AllocatorConfig, MemoryLimits
from planner.allocator.replay import PhasePeak, replay_trace
from planner.allocator.timeline import Timeline, TimelineRecorder, thin
from planner.errors import DataFileError
from planner.planning.attribution import (
    Explanation,
    Fragmentation,
    Gap,
    LiveBlock,
    ModuleShare,
    PeakLocation,
    StepPeak,
    explain,
    fold,
)
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, TensorProvenance, Trace
from planner.report.plots.timeline import draw_timeline
from tests.helpers.structs import replace
from tests.helpers.traces import traces

NOTHING = dict.fromkeys(Category, 0)
SITES = (
    Site("", "aten.empty"),
    Site("body.0.conv", "aten.convolution.default"),
    Site("body.1", "aten.relu.default"),
    Site("head", "to"),
)
# Weights of 30 MiB, an input of 4 MiB, 24 and 12 MiB of activations, 30 MiB of gradients.
EVENTS = (
    *(PhaseStart(0, Phase.SETUP), Alloc(0, 30 * MIB, Category.PARAMETER, 3)),
    *(PhaseStart(1, Phase.INPUTS), Alloc(1, 4 * MIB, Category.INPUT, 0)),
    *(
        PhaseStart(1, Phase.FORWARD),
        Alloc(2, 24 * MIB - 100, Category.ACTIVATION, 1),
        Alloc(3, 12 * MIB, Category.ACTIVATION, 2),
    ),
    *(PhaseStart(1, Phase.BACKWARD), Alloc(4, 30 * MIB, Category.GRADIENT, 3), Free(3), Free(2)),
    *(
        PhaseStart(2, Phase.INPUTS),
        Free(1),
        Alloc(5, 4 * MIB, Category.INPUT, 0),
        PhaseStart(2, Phase.END),
    ),
)
LITERAL = Trace(
    EVENTS, SITES, 8, provenance=(TensorProvenance(2, (8, 3, 512, 512), "float32", "net.py:7", "x = f(x)"),)
)


def explained(trace: Trace = LITERAL, limits: MemoryLimits = UNLIMITED) -> Explanation:
    return explain(trace, limits)


def timeline_of(trace: Trace, batch: int, limits: MemoryLimits) -> Timeline:
    recorder = TimelineRecorder()
    replay_trace(trace, limits, recorder)
    return recorder.timeline()


def test_the_peak_of_a_literal_trace() -> None:
    """The peak, its moment, categories, blocks and modules of a trace of six blocks."""
    explanation = explained()
    assert explanation.peak == PeakLocation(8, 1, Phase.BACKWARD, "head", "to")
    assert explanation.run.peak_allocated_bytes == 100 * MIB
    assert explanation.at_peak == {
        **NOTHING,
        Category.PARAMETER: 30 * MIB,
        Category.INPUT: 4 * MIB,
        Category.ACTIVATION: 36 * MIB,
        Category.GRADIENT: 30 * MIB,
    }
    step, activation, detail = Phase.FORWARD, Category.ACTIVATION, LITERAL.provenance[0]
    conv, relu = "aten.convolution.default", "aten.relu.default"
    assert explanation.blocks == (
        LiveBlock(0, 30 * MIB, 30 * MIB, Category.PARAMETER, "head", "to", 0, Phase.SETUP, None),
        LiveBlock(4, 30 * MIB, 30 * MIB, Category.GRADIENT, "head", "to", 1, Phase.BACKWARD, None),
        LiveBlock(2, 24 * MIB, 24 * MIB - 100, activation, "body.0.conv", conv, 1, step, detail),
        LiveBlock(3, 12 * MIB, 12 * MIB, activation, "body.1", relu, 1, step, None),
        LiveBlock(1, 4 * MIB, 4 * MIB, Category.INPUT, "", "aten.empty", 1, Phase.INPUTS, None),
    )


def test_modules_of_a_literal_trace() -> None:
    """A tree by qualified names, the larger child first, what belongs to no module at the root."""
    acting = {**NOTHING, Category.ACTIVATION: 24 * MIB}
    conv = ModuleShare("body.0.conv", 24 * MIB, 24 * MIB, acting, ())
    zero = ModuleShare("body.0", 24 * MIB, 0, acting, (conv,))
    one = ModuleShare("body.1", 12 * MIB, 12 * MIB, {**NOTHING, Category.ACTIVATION: 12 * MIB}, ())
    body = ModuleShare("body", 36 * MIB, 0, {**NOTHING, Category.ACTIVATION: 36 * MIB}, (zero, one))
    both = {**NOTHING, Category.PARAMETER: 30 * MIB, Category.GRADIENT: 30 * MIB}
    head = ModuleShare("head", 60 * MIB, 60 * MIB, both, ())
    root = explained().modules
    assert root == ModuleShare("", 100 * MIB, 4 * MIB, explained().at_peak, (head, body))
    assert fold(root, 1).children == (head, replace(body, own_bytes=36 * MIB, children=()))
    assert fold(root, 2).children[1].children == (replace(zero, own_bytes=24 * MIB, children=()), one)
    assert fold(root, 9) == root


def test_gaps_of_a_literal_trace() -> None:
    """Reserved bytes that are not allocated at the reserved peak are gaps, free segments, and no more."""
    events = (
        *(
            PhaseStart(0, Phase.SETUP),
            Alloc(0, 2 * MIB, Category.PARAMETER, 3),
            Alloc(1, 5 * MIB, Category.INPUT, 0),
        ),
        *(Alloc(2, 14 * MIB, Category.INPUT, 0), Free(2), Free(0)),
        *(
            PhaseStart(1, Phase.FORWARD),
            Alloc(3, 40 * MIB - 24, Category.ACTIVATION, 1),
            PhaseStart(1, Phase.END),
        ),
    )
    explanation = explained(Trace(events, SITES, 8)).fragmentation
    assert explanation == Fragmentation(
        PeakLocation(7, 1, Phase.FORWARD, "body.0.conv", "aten.convolution.default"),
        reserved_bytes=74 * MIB,
        allocated_bytes=45 * MIB,
        gap_bytes=15 * MIB,
        free_segment_bytes=14 * MIB,
        rounding_bytes=24,
        largest_gaps=(Gap(13 * MIB, 20 * MIB), Gap(2 * MIB, 20 * MIB)),
    )


def test_levels_of_a_literal_trace() -> None:
    """Phases count earlier blocks; a step is the highest of its phases and ends where the last one does."""
    explanation = explained()
    assert explanation.phases == (
        PhasePeak(0, Phase.SETUP, 30 * MIB, 30 * MIB, 30 * MIB),
        PhasePeak(1, Phase.INPUTS, 34 * MIB, 50 * MIB, 34 * MIB),
        PhasePeak(1, Phase.FORWARD, 70 * MIB, 74 * MIB, 70 * MIB),
        PhasePeak(1, Phase.BACKWARD, 100 * MIB, 104 * MIB, 64 * MIB),
        PhasePeak(2, Phase.INPUTS, 64 * MIB, 104 * MIB, 64 * MIB),
    )
    assert explanation.steps == (
        StepPeak(0, 30 * MIB, 30 * MIB, 30 * MIB),
        StepPeak(1, 100 * MIB, 104 * MIB, 64 * MIB),
        StepPeak(2, 64 * MIB, 104 * MIB, 64 * MIB),
    )


def test_evaluation_is_replayed_beside() -> None:
    """A second trace is replayed in the same limits."""
    other = Trace((PhaseStart(0, Phase.SETUP), Alloc(0, 3 * MIB, Category.PARAMETER, 3)), SITES, 8)
    assert explained().evaluation is None
    assert explain(LITERAL, UNLIMITED, other).evaluation == replay_trace(other)


def sums(share: ModuleShare) -> bool:
    """Return whether a module and all inside it add up, in all and by category."""
    parts = [share.own_bytes, *(child.size_bytes for child in share.children)]
    return sum(parts) == share.size_bytes == sum(share.by_category.values()) and all(
        map(sums, share.children)
    )


_all_limits = st.one_of(
    st.just(UNLIMITED),
    st.integers(1, 200).map(lambda size: MemoryLimits(capacity_bytes=size * MIB)),
    st.just(MemoryLimits(config=AllocatorConfig(expandable_segments=True))),
    st.integers(10, 300).map(
        lambda size: MemoryLimits(
            size * MIB, config=AllocatorConfig(max_split_bytes=32 * MIB, expandable_segments=False)
        )
    ),
)


@given(traces(), _all_limits, st.integers(0, 4))
def test_all_sums_are_those_of_the_replay(trace: Trace, limits: MemoryLimits, depth: int) -> None:
    """Categories, modules, blocks, timeline, steps and gaps equal the replay's figures to the byte."""
    batch = trace.batch
    run = replay_trace(trace, limits)
    assume(timeline_of(trace, batch, limits).allocated_bytes)
    explanation = explain(trace, limits)
    timeline, gaps = explanation.timeline, explanation.fragmentation
    assert explanation.run == run
    assert explanation.peak.event == run.peak_event
    assert sum(explanation.at_peak.values()) == run.peak_allocated_bytes
    assert sum(block.size_bytes for block in explanation.blocks) == run.peak_allocated_bytes
    assert explanation.modules.size_bytes == run.peak_allocated_bytes
    assert explanation.modules.by_category == explanation.at_peak
    assert sums(explanation.modules)
    assert sums(fold(explanation.modules, depth))
    assert max(timeline.allocated_bytes) == run.peak_allocated_bytes
    assert timeline.allocated_bytes[-1] == run.end_allocated_bytes
    assert [sum(levels) for levels in zip(*timeline.by_category.values(), strict=True)] == list(
        timeline.allocated_bytes
    )
    if run.failure is None:
        assert max(timeline.reserved_bytes) == run.peak_reserved_bytes
    assert gaps.reserved_bytes == max(timeline.reserved_bytes)
    assert gaps.reserved_bytes == gaps.allocated_bytes + gaps.gap_bytes + gaps.free_segment_bytes


@given(traces())
def test_steps_are_those_of_the_replay(trace: Trace) -> None:
    """The highest levels of the steps equal those of the replay, whose first has the set-up in it."""
    assume(trace.events)
    result = explain(trace, UNLIMITED)
    first = max((step.allocated_bytes for step in result.steps if step.step <= 1), default=0)
    assert first == result.run.first_step.allocated_bytes
    later = [step for step in result.steps if step.step > 1]
    if result.run.later_steps is not None and len(later) == len(result.run.step_peaks) - 1:
        assert max(step.allocated_bytes for step in later) == result.run.later_steps.allocated_bytes
        assert max(step.reserved_bytes for step in later) == result.run.later_steps.reserved_bytes
    assert max((step.allocated_bytes for step in result.steps), default=0) == result.run.peak_allocated_bytes
    assert max((step.reserved_bytes for step in result.steps), default=0) == result.run.peak_reserved_bytes


# ---- the picture


def test_a_thinned_timeline_keeps_its_peaks() -> None:
    """The highest event of each stretch stays, and the reserved peak, the first and the last."""
    levels = tuple(range(100)) + tuple(range(100, 0, -1))
    reserved = tuple(300 if index > 150 else 200 for index in range(200))
    timeline = Timeline(levels, reserved, {}, ())
    points = thin(timeline, 10)
    assert points == [0, 19, 39, 59, 79, 99, 100, 120, 140, 151, 160, 180, 199]
    assert thin(timeline, 200) == list(range(200))


def test_the_picture_names_phases_categories_and_the_peak(tmp_path: Path) -> None:
    """All that a reader needs stands in the picture."""
    import matplotlib

    path = tmp_path / "x.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(explained(), "toy, batch 8", path)
    drawn = path.read_text(encoding="utf-8")
    texts = [
        "parameters",
        "inputs",
        "activations",
        "gradients",
        "reserved, at most",
        "0.10 GiB",
        "step 1",
        "backward",
    ]
    assert [text for text in texts if f">{text}<" not in drawn and f"> {text}<" not in drawn] == []
    assert ">workspaces<" not in drawn


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    """A missing folder is one line."""
    path = tmp_path / "missing" / "x.png"
    with pytest.raises(DataFileError) as caught:
        draw_timeline(explained(), "toy, batch 8", path)
    assert str(caught.value) == f"{path}: cannot write the picture: No such file or directory"


def test_a_timeline_ends_with_the_request_that_fails() -> None:
    """A timeline that runs out of memory has the levels before the failing request."""
    timeline = timeline_of(LITERAL, 8, MemoryLimits(capacity_bytes=60 * MIB))
    assert timeline.allocated_bytes == (0, 30 * MIB, 30 * MIB, 34 * MIB, 34 * MIB)
    assert json.dumps(timeline.reserved_bytes[-1]) == str(50 * MIB)
