"""Lower bounds of what tensors take, against the sum of all that lives, event by event."""

from hypothesis import given, strategies as st

from planner.allocator.config import AllocatorConfig, MemoryLimits, max_reserved_bytes
from planner.allocator.replay import replay_trace
from planner.program.bounds import live_bytes_bound
from planner.program.events import Alloc, Free, Outcome
from planner.program.program import Program
from tests.helpers.traces import programs


@given(programs(), st.integers(1, 3000))
def test_the_bound_is_the_most_that_lives_at_once(program: Program, batch: int) -> None:
    """The bound is exact to the byte, though most lines are dropped; optional blocks do not count."""
    trace = program.instantiate(batch)
    alive: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if isinstance(event, Alloc):
            size_bytes = event.size_bytes
            alive[event.block] = 0 if event.may_fail else size_bytes
            most = max(most, sum(alive.values()))
        elif isinstance(event, Free):
            del alive[event.block]
    assert live_bytes_bound(program.events)(batch) == most


@given(programs(), st.integers(1, 300), st.integers(1, 400), st.booleans(), st.booleans())
def test_what_the_bound_rules_out_does_not_fit(
    program: Program, batch: int, room_mib: int, expands: bool, is_limit: bool
) -> None:
    """A batch size whose tensors alone take more than there is fails, whatever the allocator does."""
    trace = program.instantiate(batch)
    room, config = room_mib * 2**20, AllocatorConfig(expandable_segments=expands)
    limits = MemoryLimits(None, room, 2**40, config) if is_limit else MemoryLimits(room, None, 2**40, config)
    bound = max_reserved_bytes(limits)
    assert bound is not None
    if live_bytes_bound(program.events)(batch) > bound:
        assert replay_trace(trace, limits).outcome is Outcome.DOES_NOT_FIT
