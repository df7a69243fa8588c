"""Explain the memory of a run by category, module, tensor, phase and step.

The explanation has the peak by category, module and tensor, the fragmentation, and the steps. The results are
plain data, from which texts, JSON, pictures and pages are made. All sums equal the figures of the replay.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import (
    Block,
    CachingAllocator,
    MemoryLimits,
    PhasePeak,
    Replay,
    Timeline,
    TimelineRecorder,
    replay_trace,
)
from planner.hardware.cudnn import LayerWorkspace, layer_workspaces
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart, TensorProvenance, Trace

MOST_GAPS = 10  # gaps that are listed; there may be thousands


class DisplayLimits(Struct, frozen=True):
    """The largest numbers of table rows and of module levels that a report shows."""

    top: int = 10  # number of tensors or differences
    depth: int | None = None  # levels of modules; None for as many levels as are readable


class PeakLocation(Struct, frozen=True):
    """The event at which memory reaches a peak, with its step, phase, module and operator."""

    event: int  # index into the trace's events
    step: int
    phase: Phase
    module: str  # empty outside of modules
    op: str


class LiveBlock(Struct, frozen=True):
    """A block in use at the allocated peak, with its sizes, its category and the place that requested it."""

    block: int
    size_bytes: int  # as the allocator counts it
    requested_bytes: int
    category: Category
    module: str
    op: str
    step: int  # of the request
    phase: Phase
    detail: TensorProvenance | None  # shape, dtype and source line, if the trace has them


class ModuleShare(Struct, frozen=True):
    """The memory of a module and its submodules at the peak, as a tree; the model's name is ""."""

    name: str  # qualified
    size_bytes: int  # `own_bytes` and the sizes of the children
    own_bytes: int
    by_category: Mapping[Category, int]  # bytes that add up to `size_bytes`
    children: tuple["ModuleShare", ...]  # in descending order of size


class Gap(Struct, frozen=True):
    """A free range in a partly allocated segment."""

    size_bytes: int
    segment_bytes: int


class Fragmentation(Struct, frozen=True):
    """The memory reserved but not allocated when the reserved peak is first reached."""

    location: PeakLocation
    reserved_bytes: int  # allocated + gaps + free segments
    allocated_bytes: int
    gap_bytes: int  # free pieces of segments that are partly in use: they stay with the process
    free_segment_bytes: int  # segments wholly free: given back to CUDA if memory is short
    rounding_bytes: int  # the part of `allocated_bytes` by which blocks are larger than requested
    largest_gaps: tuple[Gap, ...]  # at most `MOST_GAPS`


class StepPeak(Struct, frozen=True):
    """The memory peaks of a step, and the allocated bytes at its end; step 0 is the set-up."""

    step: int
    allocated_bytes: int
    reserved_bytes: int
    end_allocated_bytes: int


class Explanation(Struct, frozen=True):
    """The memory of one run by category, module, tensor, phase and step."""

    run: Replay
    peak: PeakLocation
    at_peak: Mapping[Category, int]  # bytes that add up to the allocated peak
    modules: ModuleShare  # the same bytes by module
    blocks: tuple[LiveBlock, ...]  # the same bytes by block, in descending order of size
    fragmentation: Fragmentation
    phases: tuple[PhasePeak, ...]
    steps: tuple[StepPeak, ...]
    timeline: Timeline
    evaluation: Replay | None = None  # of the same batch in inference; None if its trace is not given
    workspaces: tuple[LayerWorkspace, ...] = ()  # of all convolutions, whether alive at the peak or not


def explain(trace: Trace, limits: MemoryLimits, evaluation: Trace | None = None) -> Explanation:
    """Replay a trace, and explain its memory by category, module, tensor, phase and step.

    The trace is replayed under `limits`. `evaluation` is the trace of the same batch in inference. A run that
    fails is explained up to its failure. Raises ValueError if no event of the trace can be replayed.
    """
    recorder = TimelineRecorder()
    run = replay_trace(trace, limits, recorder)
    timeline = recorder.timeline()
    if not timeline.allocated_bytes:
        raise ValueError("the trace has no event that could be run")
    peak, reserved_peak = timeline.peak_event, timeline.reserved_peak_event
    live, fragmentation = _inspect(trace, limits, peak, reserved_peak)
    phases = _by_phase(run.phase_peaks)
    return Explanation(
        run=run,
        peak=moment_of(trace, peak),
        at_peak={category: levels[peak] for category, levels in timeline.by_category.items()},
        modules=share_modules(live),
        blocks=tuple(sorted(live, key=lambda block: (-block.size_bytes, block.block))),
        fragmentation=fragmentation,
        phases=phases,
        steps=tuple(_by_step(phases)),
        timeline=timeline,
        evaluation=None if evaluation is None else replay_trace(evaluation, limits),
        workspaces=layer_workspaces(trace),
    )


def moment_of(trace: Trace, event: int) -> PeakLocation:
    """Return the step and phase of an event of a trace and, if it allocates, its module and operator."""
    mark = PhaseStart(0, Phase.SETUP)
    for entry in trace.events[: event + 1]:
        if isinstance(entry, PhaseStart):
            mark = entry
    alloc = trace.events[event]
    if not isinstance(alloc, Alloc):
        return PeakLocation(event, mark.step, mark.phase, "", "")
    site = trace.sites[alloc.site]
    return PeakLocation(event, mark.step, mark.phase, site.module, site.op)


def _inspect(
    trace: Trace, limits: MemoryLimits, peak: int, reserved_peak: int
) -> tuple[tuple[LiveBlock, ...], Fragmentation]:
    """Return the blocks alive after event `peak`, and the fragmentation after event `reserved_peak`."""
    live: dict[int, tuple[Alloc, PhaseStart, Block]] = {}
    mark = PhaseStart(0, Phase.SETUP)
    blocks: tuple[LiveBlock, ...] = ()
    fragmentation: Fragmentation | None = None

    def inspect(allocator: CachingAllocator, index: int, event: Event, block: Block | None) -> None:
        nonlocal mark, blocks, fragmentation
        if isinstance(event, Alloc) and block is not None:
            live[event.block] = event, mark, block
        elif isinstance(event, Free):
            del live[event.block]
        elif isinstance(event, PhaseStart):
            mark = event
        if index == peak:
            blocks = _live_blocks(trace, live)
        if index == reserved_peak:
            rounding = sum(block.size_bytes - event.size_bytes for event, _, block in live.values())
            fragmentation = _fragmentation(moment_of(trace, index), allocator, rounding)

    replay_trace(trace, limits, inspect)
    assert fragmentation is not None
    return blocks, fragmentation


def _live_blocks(trace: Trace, live: Mapping[int, tuple[Alloc, PhaseStart, Block]]) -> tuple[LiveBlock, ...]:
    details = {detail.block: detail for detail in trace.provenance}
    return tuple(
        LiveBlock(
            event.block,
            block.size_bytes,
            event.size_bytes,
            event.category,
            trace.sites[event.site].module,
            trace.sites[event.site].op,
            mark.step,
            mark.phase,
            details.get(event.block),
        )
        for event, mark, block in live.values()
    )


def _fragmentation(location: PeakLocation, allocator: CachingAllocator, rounding_bytes: int) -> Fragmentation:
    segments = allocator.snapshot()
    used = [segment for segment in segments if any(block.in_use for block in segment.blocks)]
    gaps = [
        Gap(block.size_bytes, segment.size_bytes)
        for segment in used
        for block in segment.blocks
        if not block.in_use
    ]
    gaps.sort(key=lambda gap: (-gap.size_bytes, gap.segment_bytes))
    return Fragmentation(
        location,
        reserved_bytes=allocator.reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        gap_bytes=sum(gap.size_bytes for gap in gaps),
        free_segment_bytes=sum(segment.size_bytes for segment in segments)
        - sum(segment.size_bytes for segment in used),
        rounding_bytes=rounding_bytes,
        largest_gaps=tuple(gaps[:MOST_GAPS]),
    )


def _by_phase(peaks: Iterable[PhasePeak]) -> tuple[PhasePeak, ...]:
    """Merge a step's peaks of the same phase into their maximum, and drop the phase END.

    With gradient accumulation, a phase comes several times in a step.
    """
    merged: dict[tuple[int, Phase], PhasePeak] = {}
    for peak in peaks:
        if peak.phase is Phase.END:
            continue
        so_far = merged.get((peak.step, peak.phase), peak)
        merged[peak.step, peak.phase] = replace(
            peak,
            allocated_bytes=max(so_far.allocated_bytes, peak.allocated_bytes),
            reserved_bytes=max(so_far.reserved_bytes, peak.reserved_bytes),
        )
    return tuple(merged.values())


def _by_step(phases: Sequence[PhasePeak]) -> Iterator[StepPeak]:
    for step, group in groupby(phases, key=lambda phase: phase.step):
        peaks = list(group)
        allocated_bytes = max(phase.allocated_bytes for phase in peaks)
        reserved_bytes = max(phase.reserved_bytes for phase in peaks)
        yield StepPeak(step, allocated_bytes, reserved_bytes, peaks[-1].end_allocated_bytes)


def share_modules(blocks: Iterable[LiveBlock], name: str = "", level: int = 0) -> ModuleShare:
    """Return the memory of the module `name` as a tree of its submodules that have blocks.

    `blocks` are all blocks inside the module `name`, which is `level` levels below the model.
    """
    own_bytes = 0
    by_category = dict.fromkeys(Category, 0)
    inner: dict[str, list[LiveBlock]] = {}
    for block in blocks:
        by_category[block.category] += block.size_bytes
        parts = block.module.split(".") if block.module else []
        if len(parts) == level:
            own_bytes += block.size_bytes
        else:
            inner.setdefault(".".join(parts[: level + 1]), []).append(block)
    children = [share_modules(some, child, level + 1) for child, some in inner.items()]
    children.sort(key=lambda child: -child.size_bytes)  # stable: equal sizes stay in the model's order
    return ModuleShare(name, sum(by_category.values()), own_bytes, by_category, tuple(children))


def fold(share: ModuleShare, depth: int) -> ModuleShare:
    """Return a tree cut `depth` levels below `share`; modules at the cut own the bytes of removed modules."""
    if depth <= 0:
        return replace(share, own_bytes=share.size_bytes, children=())
    return replace(share, children=tuple(fold(child, depth - 1) for child in share.children))
