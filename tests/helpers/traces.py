"""Traces without a tracer: a few nouns to write them down, and random ones for property tests."""

from hypothesis import HealthCheck, settings, strategies as st

from planner.allocator.config import MIB
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace
from tests.helpers.structs import replace

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # for slow machines

SITES = (Site("", "to"), Site("features.0", "aten.convolution"), Site("classifier", "aten.addmm"))


def alloc(
    block: int, fixed_bytes: int, per_sample_bytes: int = 0, role: Category = Category.TEMPORARY
) -> Alloc:
    """A block at the first site."""
    return Alloc(block, fixed_bytes, per_sample_bytes, role, 0)


def taken_at(affine: Trace, batch: int) -> Trace:
    """What the tracer sees at one batch size of a job whose sizes are straight lines."""
    events = tuple(
        replace(event, fixed_bytes=event.fixed_bytes + event.per_sample_bytes * batch, per_sample_bytes=0)
        if isinstance(event, Alloc)
        else event
        for event in affine.events
    )
    return Trace(events, affine.sites, (batch,), affine.unknown_ops, affine.notes)


_sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(1, 40).map(lambda number: number * MIB),
)
_texts = st.lists(st.text(max_size=12), max_size=2).map(tuple)


@st.composite
def affine_traces(draw: st.DrawFn, most_events: int = 30) -> Trace:
    """Any valid trace that holds for every batch size, fitted at 2 and 3."""
    sites = tuple(draw(st.lists(st.builds(Site, st.text(max_size=8), st.text(max_size=8)), min_size=1)))
    events: list[Event] = []
    alive: list[int] = []
    step = 0
    for number in range(draw(st.integers(0, most_events))):
        turn = draw(st.integers(0, 9))
        if turn == 0:
            step += draw(st.integers(0, 1))
            events.append(PhaseStart(step, draw(st.sampled_from([p for p in Phase if p is not Phase.END]))))
        elif turn < 4 and alive:
            events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
        else:
            slope = draw(st.one_of(st.just(0), _sizes))
            at_one = draw(_sizes) if slope == 0 else draw(st.one_of(st.just(0), st.just(slope), _sizes))
            role, site = draw(st.sampled_from(Category)), draw(st.integers(0, len(sites) - 1))
            optional = draw(st.integers(0, 9)) == 9
            events.append(Alloc(number, at_one - slope, slope, role, site, optional))
            alive.append(number)
    return Trace(tuple(events), sites, (2, 3), draw(_texts), draw(_texts))


def traces() -> st.SearchStrategy[Trace]:
    """Any valid trace: for every batch size, or taken at a single one."""
    return st.one_of(affine_traces(), st.builds(taken_at, affine_traces(), st.integers(2, 64)))
