"""Gradient accumulation over many micro-batches."""

import pytest

from planner import max_batch
from planner.allocator.config import UNLIMITED
from planner.allocator.replay import replay_trace
from planner.capture.loop.training_loop import MOST_MICRO_BATCHES
from planner.capture.session import record
from planner.jobs import FIELD_OPTIONS, Job, Optimizer, parse_tensor_spec, resolve_job
from planner.jobs.files.catalogue import load_catalogue
from planner.program.events import Alloc, Free, Phase, PhaseStart, Trace

JOB = Job.create(
    "torchvision:resnet18",
    inputs=(parse_tensor_spec("3x64x64"),),
    target=parse_tensor_spec("scalar:int64"),
    optimizer=Optimizer.ADAMW,
)


def taken(accumulate: int) -> Trace:
    return record(JOB.replace(accumulate=accumulate), 4, (8, 0))


def events_by_micro_batch(one: Trace) -> list[list[tuple[object, ...]]]:
    """Return births and deaths in each micro-batch of the second step; blocks count from its start."""
    batches: list[list[tuple[object, ...]]] = []
    births = {event.block: number for number, event in enumerate(one.events) if isinstance(event, Alloc)}
    start = 0
    for number, event in enumerate(one.events):
        if isinstance(event, PhaseStart):
            if event.step == 2 and event.phase is Phase.OPTIMIZER:
                return batches
            if event.step == 2 and event.phase is Phase.INPUTS:
                batches.append([])
                start = number
        elif batches and isinstance(event, Alloc):
            batches[-1].append((event.size_bytes, one.sites[event.site]))
        elif batches and isinstance(event, Free):
            batches[-1].append((births[event.block] - start,))
    return batches


def test_all_micro_batches_after_the_first_allocate_the_same() -> None:
    """Births and deaths of micro-batch 4 are those of 3, and the births of 3 those of 2, to the byte."""
    _, second, third, *others = events_by_micro_batch(taken(MOST_MICRO_BATCHES))
    assert others == [third] * (MOST_MICRO_BATCHES - 3)
    assert [one for one in second if len(one) > 1] == [one for one in third if len(one) > 1]


def test_more_micro_batches_take_no_more_memory() -> None:
    """Peaks are those of fewer micro-batches from the second on, and a note states how many are run."""
    few, most, many = taken(3), taken(MOST_MICRO_BATCHES), taken(4096)
    peaks = [replay_trace(one, UNLIMITED) for one in (few, most, many)]
    assert len({run.peak_allocated_bytes for run in peaks}) == 1
    assert len({run.peak_reserved_bytes for run in peaks}) == 1
    assert many.events == most.events
    assert not any("micro-batches" in note for note in most.notes)
    assert any("of the 4,096 micro-batches in each step, 4 are run" in note for note in many.notes)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [128, FIELD_OPTIONS["accumulate"].maximum])
def test_accumulation_above_a_hundred_is_planned(accumulate: int) -> None:
    """An accumulation of more than 100 micro-batches is a job like others; its answer notes how it ran."""
    assert resolve_job("vit_b_16", load_catalogue(), accumulate=accumulate).loop.accumulate == accumulate
    result = max_batch("torchvision:resnet18", input="3x64x64", accumulate=accumulate, gpu_mib=2000)
    assert result.max_batch > 0
    assert any("micro-batches in each step" in one for one in result.to_dict()["at_max"]["assumptions"])
