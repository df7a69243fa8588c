"""What tensors take at the least, against the sum of all that lives, event by event."""

from hypothesis import given, strategies as st

from planner.allocator.config import AllocatorRules
from planner.allocator.replay import Arena, replay_trace, room_bytes
from planner.program.bounds import least_bytes
from planner.program.events import Alloc, Free, Outcome, Trace
from tests.helpers.traces import UNTIMED, affine_traces


@UNTIMED
@given(affine_traces(), st.integers(1, 3000))
def test_the_floor_is_the_most_that_lives_at_once(trace: Trace, batch: int) -> None:
    """To the byte, although most lines are forgotten; what the process can do without does not count."""
    alive: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if isinstance(event, Alloc):
            size_bytes = event.fixed_bytes + event.per_sample_bytes * batch
            alive[event.block] = 0 if event.optional else size_bytes
            most = max(most, sum(alive.values()))
        elif isinstance(event, Free):
            del alive[event.block]
    assert least_bytes(trace.events)(batch) == most


@UNTIMED
@given(affine_traces(), st.integers(1, 300), st.integers(1, 400), st.booleans(), st.booleans())
def test_what_the_floor_rules_out_does_not_fit(
    trace: Trace, batch: int, room_mib: int, expands: bool, is_limit: bool
) -> None:
    """A batch size whose tensors alone take more than there is fails, whatever the allocator does."""
    room, rules = room_mib * 2**20, AllocatorRules(expandable_segments=expands)
    arena = Arena(None, room, 2**40, rules) if is_limit else Arena(room, None, 2**40, rules)
    bound = room_bytes(arena)
    assert bound is not None
    if least_bytes(trace.events)(batch) > bound:
        assert replay_trace(trace, batch, arena).outcome is Outcome.DOES_NOT_FIT
