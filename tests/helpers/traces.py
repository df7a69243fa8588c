"""Traces and programs without a capture: nouns to write them down, and random ones for property tests."""

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from planner.allocator.config import MIB
from planner.program.batch_sizes import ANY_BATCH_SIZE, BatchSizes
from planner.program.bounds import LowerBound, live_bytes_bound
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace
from planner.program.program import (
    LARGEST_BATCH,
    AffineAlloc,
    Program,
    ProgramEvent,
    Variants,
    constant_alloc,
    constant_program,
)
from planner.program.target import Target
from planner.store.codec import load_programs, save_programs

SITES = (Site("", "to"), Site("features.0", "aten.convolution"), Site("classifier", "aten.addmm"))
GA102 = Target((8, 6), 84)


def alloc(
    block: int, fixed_bytes: int, per_sample_bytes: int = 0, category: Category = Category.TEMPORARY
) -> Any:
    """Return an allocation at the first site."""
    if per_sample_bytes:
        return AffineAlloc(block, fixed_bytes, per_sample_bytes, category, 0)
    return Alloc(block, fixed_bytes, category, 0)


def program_of(
    events: Iterable[Event | ProgramEvent],
    sites: tuple[Site, ...] = SITES,
    unknown_ops: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Program:
    """Return a program without kernel calls that holds for every batch size."""
    affine = (
        constant_alloc(event, event.block, event.site) if isinstance(event, Alloc) else event
        for event in events
    )
    targets = {GA102.capability: Variants(0, 1, LARGEST_BATCH, [])}
    return Program(tuple(affine), sites, targets=targets, unknown_ops=unknown_ops, notes=notes)


class OneProgram:
    """One program for every GPU; counts its traces."""

    def __init__(self, program: Program) -> None:
        self.program, self.trace_count = program, 0

    def trace(self, batch: int, target: Target) -> Trace:
        self.trace_count += 1
        return self.program.instantiate(batch)

    def key(self, batch: int, target: Target) -> Hashable:
        return "all the same"

    def bound(self, target: Target) -> LowerBound | None:
        return live_bytes_bound(self.program.events)

    def batch_sizes(self, target: Target) -> BatchSizes:
        return ANY_BATCH_SIZE


class RunTraces:
    """Traces each of which is a run, once for each batch size."""

    def __init__(self, run: Callable[[int], Trace]) -> None:
        self.run, self.taken = run, dict[int, Trace]()

    def trace(self, batch: int, target: Target) -> Trace:
        if batch not in self.taken:
            self.taken[batch] = self.run(batch)
        return self.taken[batch]

    def key(self, batch: int, target: Target) -> Hashable:
        return None

    def bound(self, target: Target) -> LowerBound | None:
        return None

    def batch_sizes(self, target: Target) -> BatchSizes:
        return ANY_BATCH_SIZE


def save_trace(saved: Trace | Program, path: Path, about: dict[str, Any]) -> None:
    """Save a trace or a program for GPUs of compute capability 8.6."""
    program = constant_program(saved, GA102) if isinstance(saved, Trace) else saved
    save_programs([program], path, about)


def load_trace(path: Path) -> tuple[Trace, dict[str, Any]]:
    """Load the trace of a file that holds one for one batch size."""
    file = load_programs(path)
    (encoded,) = file.programs
    assert encoded.load_target(GA102.capability)
    batch = encoded.program.targets[GA102.capability].min_batch
    trace = encoded.program.specialize(batch, GA102)
    assert trace is not None
    return trace, file.about


_sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(1, 40).map(lambda number: number * MIB),
)
_texts = st.lists(st.text(max_size=12), max_size=2).map(tuple)


@st.composite
def programs(draw: st.DrawFn, most_events: int = 30) -> Program:
    """Any valid program without kernel calls."""
    sites = tuple(draw(st.lists(st.builds(Site, st.text(max_size=8), st.text(max_size=8)), min_size=1)))
    events: list[ProgramEvent] = []
    alive: list[int] = []
    step = 0
    for number in range(draw(st.integers(0, most_events))):
        turn = draw(st.integers(0, 9))
        if turn == 0:
            step += draw(st.integers(0, 1))
            phase = draw(st.sampled_from([p for p in Phase if p is not Phase.END]))
            events.append(PhaseStart(step, phase))
        elif turn < 4 and alive:
            block = alive.pop(draw(st.integers(0, len(alive) - 1)))
            events.append(Free(block, empties_cache=draw(st.booleans())))
        else:
            slope = draw(st.one_of(st.just(0), _sizes))
            at_one = draw(_sizes) if slope == 0 else draw(st.one_of(st.just(0), st.just(slope), _sizes))
            category, site = draw(st.sampled_from(Category)), draw(st.integers(0, len(sites) - 1))
            may_fail = draw(st.integers(0, 9)) == 9
            stream = draw(st.sampled_from([0, 0, 0, 1, 33]))
            events.append(AffineAlloc(number, at_one - slope, slope, category, site, may_fail, stream))
            alive.append(number)
    return program_of(events, sites, draw(_texts), draw(_texts))


def traces() -> st.SearchStrategy[Trace]:
    """Draw any valid trace of a single batch size."""
    return st.builds(lambda program, batch: program.instantiate(batch), programs(), st.integers(2, 64))
