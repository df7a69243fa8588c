"""DeepSpeed's engine on meta: what each stage of ZeRO leaves on the first rank."""

import json
from math import ceil
from typing import Any

import pytest
from torch.nn import functional as F

from planner.allocator import UNLIMITED, replay_trace
from planner.capture.session import record
from planner.jobs import Loss, Mode, Optimizer
from planner.program.events import Alloc, Category, Phase, PhaseStart, Trace, validate
from tests.capture.techniques.test_sharding import WIDE, Net
from tests.helpers.models import AMPERE, job_of, on_meta

pytest.importorskip("deepspeed", reason="DeepSpeed is not among the extras")

NUMBERS = sum(parameter.numel() for parameter in Net().parameters())
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
BUCKETS_3 = {"reduce_bucket_size": 300_000, "stage3_param_persistence_threshold": 0}


def trained(stage: int, ranks: int = 2, more: dict[str, Any] | None = None, **fields: Any) -> Trace:
    """The trace of the first rank's two steps with AdamW."""
    buckets = BUCKETS if stage < 3 else BUCKETS_3
    config = {"zero_optimization": {"stage": stage, **buckets}, **(more or {})}
    loop = {"mode": Mode.TRAIN, "loss": Loss.SUM, "steps": 2, "optimizer": Optimizer.ADAMW, **fields}
    job = job_of(str(WIDE), deepspeed=json.dumps(config), world_size=ranks, **loop)
    return record(job, 4, AMPERE, on_meta(Net))


def held(trace: Trace, category: Category) -> int:
    """Bytes of a category that live at the end."""
    freed = {
        event.block for event in trace.events if not isinstance(event, Alloc) and hasattr(event, "block")
    }
    return sum(
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and event.category is category and event.block not in freed
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_is_shared_among_ranks(stage: int) -> None:
    """Each rank has its part of the master weights and of both moments, in float32."""
    for ranks in (2, 4):
        trace = trained(stage, ranks, {"bf16": {"enabled": True}})
        validate(trace)
        assert held(trace, Category.OPTIMIZER) == pytest.approx(3 * 4 * NUMBERS / ranks, rel=0.001)


def test_parameters_are_shared_in_stage_3_alone() -> None:
    """Before, each rank has all of them."""
    whole, part = (held(trained(stage, 4), Category.PARAMETER) for stage in (2, 3))
    assert whole == pytest.approx(4 * NUMBERS, rel=0.001)
    assert part == pytest.approx(4 * ceil(NUMBERS / 4), rel=0.001)


def test_more_ranks_never_need_more() -> None:
    """Peaks fall with the number of ranks."""
    for stage in (1, 2, 3):
        peaks = [replay_trace(trained(stage, ranks), UNLIMITED).peak_allocated_bytes for ranks in (2, 4, 8)]
        assert peaks == sorted(peaks, reverse=True)


def test_accumulation_and_clipping_are_the_engines() -> None:
    """A third micro-batch adds nothing to two, and the note names the engine."""
    two, three = (
        replay_trace(
            trained(2, more={"gradient_accumulation_steps": count, "gradient_clipping": 1.0}), UNLIMITED
        )
        for count in (2, 3)
    )
    assert two.peak_allocated_bytes == three.peak_allocated_bytes
    assert "ZeRO 2, by its own engine" in trained(2).notes[0]


def test_fused_adam_of_the_file() -> None:
    """DeepSpeed's own Adam keeps the same state as torch's."""
    own = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    assert held(trained(1, more=own), Category.OPTIMIZER) == pytest.approx(3 * 4 * NUMBERS / 2, rel=0.001)


def test_the_bucket_of_stage_3_is_one_block_of_gradients() -> None:
    """It is as large as the file says, and no larger for its many numbers."""
    buckets = {"stage": 3, "reduce_bucket_size": 50_000_000}
    trace = trained(3, more={"zero_optimization": buckets, "fp16": {"enabled": True}})
    gradients = [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and event.category is Category.GRADIENT
    ]
    assert max(gradients) == 2 * 50_000_000


def test_a_trace_leaves_nothing_behind() -> None:
    """Traces of two jobs in a row are the same, whatever ran between, and torch is as before."""
    linear = F.linear
    first = trained(3)
    trained(1, 4)
    assert trained(3).events == first.events
    assert F.linear is linear


def test_it_evaluates_and_gathers_weights_before_the_last_step() -> None:
    """Weights are gathered layer by layer, if the configuration says that they are saved whole."""
    gathers = {
        "zero_optimization": {"stage": 3, **BUCKETS_3, "stage3_gather_16bit_weights_on_model_save": True}
    }
    trace = trained(3, evaluate=True, more=gathers)
    phases = [event.phase for event in trace.events if isinstance(event, PhaseStart) and event.step == 2]
    evaluated = [Phase.INPUTS, Phase.EVALUATION] * 2
    assert phases[:5] == [*evaluated, Phase.GATHERING]
    assert Phase.GATHERING not in {
        event.phase for event in trained(3).events if isinstance(event, PhaseStart)
    }


def test_a_batch_has_the_precision_of_the_configuration() -> None:
    """A script converts its images as the engine converts the model."""
    sizes = []
    for enabled in (False, True):
        events = trained(2, more={"bf16": {"enabled": enabled}}).events
        begin = events.index(PhaseStart(1, Phase.INPUTS))
        sizes += [event.size_bytes for event in events[begin : begin + 2] if isinstance(event, Alloc)]
    assert sizes[0] == 2 * sizes[1]
