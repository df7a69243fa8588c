"""CUDA graphs of compiled models: what their warm-ups and recordings allocate, and in which pool."""

from functools import cache

import pytest
from torch import nn

from planner.errors import UsageError
from planner.jobs import Compile, Job, Loss, Mode, TensorSpec, ZeroGrad, complete_job, parse_tensor_spec
from planner.program.events import GRAPH_POOL, Alloc, Free, Phase, PhaseStart, Trace
from tests.helpers.compiled import BATCH, CLASSES, FLUSHED, HIDDEN, WIDTH, WORKSPACE, Broken, Gated
from tests.helpers.models import job_of, trace_of

STATE = [8, 8]  # the seed and the offset of a graph's random numbers
INPUT, HIDDEN_BYTES, OUT = (4 * BATCH * width for width in (WIDTH, HIDDEN, CLASSES))


def _job(**fields: object) -> Job:
    given = {"mode": Mode.TRAIN, "steps": 4, "loss": Loss.SUM, "compile": Compile.REDUCE_OVERHEAD, **fields}
    return job_of(str(WIDTH), **given)


@cache
def _trace(model: type[nn.Module], zero_grad: ZeroGrad = ZeroGrad.BEFORE_FORWARD) -> Trace:
    return trace_of(model, _job(zero_grad=zero_grad), BATCH)


def _born(trace: Trace, step: int, phase: Phase, *, private: bool) -> list[int]:
    """Sizes of the blocks of a pool that are allocated in a phase, in order."""
    sizes, now = [], (0, Phase.SETUP)
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.step, event.phase
        elif isinstance(event, Alloc) and now == (step, phase) and (event.stream == GRAPH_POOL) == private:
            sizes.append(event.size_bytes)
    return sizes


def _private_left(trace: Trace, step: int) -> int:
    """Return the bytes that are allocated in the private pool when a step begins."""
    left: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, PhaseStart) and event.step == step:
            break
        if isinstance(event, Alloc) and event.stream == GRAPH_POOL:
            left[event.block] = event.size_bytes
        elif isinstance(event, Free):
            left.pop(event.block, None)
    return sum(left.values())


def test_a_graph_is_warmed_up_then_recorded_then_replayed() -> None:
    """The first step runs in the private pool, the second also copies the input there, others allocate
    nothing.
    """
    trace = _trace(Gated)
    warm_up, recording, replay = (_born(trace, step, Phase.FORWARD, private=True) for step in (1, 2, 3))
    assert recording == [INPUT, HIDDEN_BYTES, WORKSPACE, HIDDEN_BYTES, OUT]
    assert [size for size in warm_up if size != FLUSHED] == recording[1:]
    assert replay == []
    assert _born(trace, 3, Phase.BACKWARD, private=True) == []


def test_each_recording_keeps_the_state_of_its_random_numbers() -> None:
    """The first graph is an empty one, which keeps the pool alive; forward and backward are one each."""
    trace = _trace(Gated)
    emptying, loss = 1, 4  # the cache is emptied by the free of a block, here of one for that alone
    assert _born(trace, 1, Phase.FORWARD, private=False) == [emptying, *STATE, loss]
    assert _born(trace, 2, Phase.FORWARD, private=False)[-3:] == [*STATE, loss]
    assert _born(trace, 2, Phase.BACKWARD, private=False)[-2:] == STATE
    assert 8 not in _born(trace, 3, Phase.FORWARD, private=False)


def test_a_recording_empties_the_cache() -> None:
    """`torch.cuda.graph` does so before it captures: the empty graph, and the two of the second step."""
    assert sum(isinstance(e, Free) and e.empties_cache for e in _trace(Gated).events) == 3


def test_gradients_are_of_the_pool_until_they_are_dropped() -> None:
    """After the warm-up they are allocated there; a replay allocates none."""
    trace = _trace(Gated)
    parameters = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)
    assert _private_left(trace, 2) >= parameters
    assert _private_left(trace, 4) == 0


def test_gradients_that_are_dropped_late_end_at_the_next_forward_pass() -> None:
    """A new generation of graphs overwrites the outputs of the last: their blocks are freed by then."""
    early, late = (_trace(Gated, when) for when in (ZeroGrad.BEFORE_FORWARD, ZeroGrad.BEFORE_BACKWARD))
    for step in (1, 2):
        assert _born(early, step, Phase.FORWARD, private=True) == _born(
            late, step, Phase.FORWARD, private=True
        )
    assert _private_left(late, 4) == 0


def test_graph_breaks_make_more_graphs() -> None:
    """Each part is recorded by itself: four graphs beside the empty one."""
    events = _trace(Broken).events
    assert sum(isinstance(e, Free) and e.empties_cache for e in events) == 5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"accumulate": 2}, "--accumulate"),
        ({"keep_grads": True}, "--keep-grads"),
        ({"inputs": (TensorSpec((32,), "float32"), parse_tensor_spec("16..64"))}, "samples of many sizes"),
    ],
)
def test_jobs_that_fail_with_graphs_are_refused(fields: dict[str, object], reason: str) -> None:
    """The message names what fails in torch."""
    with pytest.raises(UsageError, match=reason):
        complete_job(_job().replace(**fields))
