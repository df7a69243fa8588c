"""The host memory of a process, by literal traces."""

import pytest

from planner.jobs.job import Job, Mode, Quantize
from planner.planning.host_memory import HostMemory, count_host_memory
from planner.program.events import Category, Event, Free, Phase, PhaseStart, Trace
from tests.helpers.traces import SITES, alloc

JOB = Job.create("toy")
EVENTS: tuple[Event, ...] = (
    *(PhaseStart(0, Phase.SETUP), alloc(0, 100, category=Category.PARAMETER)),
    *(alloc(1, 4000, category=Category.PARAMETER), alloc(2, 7, category=Category.PARAMETER), Free(2)),
    *(PhaseStart(1, Phase.INPUTS), alloc(3, 50, category=Category.INPUT)),
    *(PhaseStart(1, Phase.FORWARD), alloc(4, 6, category=Category.INPUT), alloc(5, 900)),
    *(PhaseStart(1, Phase.OPTIMIZER), alloc(6, 4100, category=Category.OPTIMIZER)),
    *(PhaseStart(2, Phase.INPUTS), alloc(7, 56, category=Category.INPUT), PhaseStart(2, Phase.END)),
)
TRACE = Trace(EVENTS, SITES, 1, pinned=(512, 1024))


def test_a_checkpoint_is_weights_and_optimizer_state() -> None:
    """It is as large as what is alive at the end; a batch is what one step copies to the GPU."""
    assert count_host_memory(JOB, TRACE) == HostMemory(4100, 56, 8200, 4100, 1536)


def test_inference_saves_nothing() -> None:
    """Weights and batches are on the host before they are on the GPU all the same."""
    found = count_host_memory(JOB.replace(mode=Mode.INFER), TRACE)
    assert found == HostMemory(4100, 56, None, None, 1536)


@pytest.mark.parametrize(
    "made_otherwise",
    [{"fsdp": 2}, {"tp": 2}, {"world_size": 2}, {"deepspeed": "{}"}, {"quantize": Quantize.NF4}],
)
def test_weights_that_libraries_build_are_unknown(made_otherwise: dict[str, object]) -> None:
    """Each rank may hold its shard or the whole, and a quantized weight its parts."""
    found = count_host_memory(JOB.replace(**made_otherwise), TRACE)
    assert found == HostMemory(None, 56, None, None, 1536)
