"""The phases of a job, with the peaks of each in literal replays."""

from typing import Any

import pytest

from planner.allocator.config import MIB, UNLIMITED
from planner.allocator.replay import replay_trace
from planner.jobs import FsdpArguments, Job, Mode, Quantize
from planner.planning.phases import JobPhase, JobPhasePeak, job_phases
from planner.program.events import Category, Event, Fact, Free, Phase, PhaseStart, Trace
from tests.helpers.traces import SITES, alloc

JOB = Job.create("toy")
# 30 MiB of weights; 10 MiB stay after the first step, 2 MiB are an output; each step takes 12 MiB in between.
EVENTS: tuple[Event, ...] = (
    *(PhaseStart(0, Phase.SETUP), alloc(0, 30 * MIB, category=Category.PARAMETER)),
    *(
        PhaseStart(1, Phase.INPUTS),
        alloc(1, 12 * MIB),
        PhaseStart(1, Phase.BACKWARD),
        alloc(2, 10 * MIB, category=Category.OPTIMIZER),
        Free(1),
    ),
    *(PhaseStart(2, Phase.INPUTS), alloc(3, 14 * MIB), Free(3)),
)
EVALUATION: tuple[Event, ...] = (
    *(PhaseStart(2, Phase.INPUTS), alloc(4, 40 * MIB), PhaseStart(2, Phase.EVALUATION), alloc(5, 8 * MIB)),
    *(Free(5), Free(4)),
)
END: tuple[Event, ...] = (PhaseStart(2, Phase.INPUTS), alloc(6, 2 * MIB), PhaseStart(2, Phase.END))


def phases_of(job: Job, *events: Event) -> tuple[JobPhasePeak, ...]:
    """Return the phases of a job that is replayed in unlimited memory."""
    trace = Trace(events, SITES, 1)
    return job_phases(job, trace, replay_trace(trace), UNLIMITED)


def phases(job: Job, *events: Event) -> dict[str, tuple[int | None, int | None]]:
    """Return allocated and reserved MiB of each phase."""
    found = phases_of(job, *events)
    sizes = lambda of: (of.allocated_bytes, of.reserved_bytes)  # noqa: E731
    return {of.phase.value: tuple(size and size // MIB for size in sizes(of)) for of in found}


def test_phases_of_training() -> None:
    """Saving takes what the last step leaves, and resuming weights and optimizer state beside the weights."""
    assert phases(JOB, *EVENTS, *END) == {
        "loading": (30, 30),
        "first_step": (52, 52),
        "later_steps": (54, 66),
        "evaluation": (None, None),
        "saving": (42, 66),
        "resuming": (70, 70),
    }


def test_weights_from_the_host_take_no_more_than_loading() -> None:
    """A Trainer copies them into the model, and places the optimizer state on the GPU."""
    trace = Trace((*EVENTS, *END), SITES, 1, facts=frozenset({Fact.WEIGHTS_FROM_HOST}))
    resuming = job_phases(JOB, trace, replay_trace(trace), UNLIMITED)[-1]
    assert resuming == JobPhasePeak(JobPhase.RESUMING, 40 * MIB, 40 * MIB)


def test_an_evaluation_has_its_own_peaks() -> None:
    """They include those of copying its batches; the steps keep theirs, but for what stays reserved."""
    found = phases(JOB, *EVENTS, *EVALUATION, *END)
    assert found["evaluation"] == (88, 106)
    assert found["later_steps"] == (54, 106)


def test_phases_of_shards() -> None:
    """Shards are saved as they are, or gathered one by one; a step with gradients of zeros resumes them."""
    events: tuple[Event, ...] = (
        PhaseStart(0, Phase.SETUP),
        *(alloc(0, 30 * MIB, category=Category.PARAMETER), alloc(1, 10 * MIB, category=Category.PARAMETER)),
        *(PhaseStart(1, Phase.INPUTS), alloc(2, 12 * MIB)),
        *(PhaseStart(1, Phase.BACKWARD), alloc(3, 40 * MIB, category=Category.GRADIENT)),
        *(PhaseStart(1, Phase.OPTIMIZER), alloc(4, 80 * MIB, category=Category.OPTIMIZER)),
        *(alloc(5, 6 * MIB), Free(5), Free(3), PhaseStart(2, Phase.INPUTS), Free(2)),
    )
    assert phases(JOB.replace(fsdp=2), *events, *END) == {
        "loading": (40, 40),
        "first_step": (178, 192),
        "later_steps": (132, 192),
        "evaluation": (None, None),
        "saving": (122, 192),
        "gathering": (282, 412),
        "resuming": (166, 180),
    }


@pytest.mark.parametrize(
    ("given", "shards"),
    [({}, 8), ({"replicas": 2}, 4), ({"offload": True}, None), ({"reduce_dtype": "bf16"}, 8)],
)
def test_a_whole_checkpoint_gathers_from_the_ranks_that_share_a_parameter(
    given: dict[str, Any], shards: int | None
) -> None:
    """Replicas of shards gather nothing from each other; shards on the CPU are not planned."""
    job = JOB.replace(fsdp=8, fsdp_arg=FsdpArguments(**given))
    (allocated, _) = phases(job, *EVENTS, *END).get("gathering", (None, None))
    assert allocated == (shards and 42 + shards * 30)


@pytest.mark.parametrize(
    "sharded",
    [
        {"fsdp": 2, "tp": 2},
        {"fsdp": 2, "fsdp_arg": FsdpArguments(offload=True)},
        *({"tp": 2}, {"world_size": 2}, {"deepspeed": "{}", "quantize": Quantize.NF4}),
        {"quantize": Quantize.INT8_TRAINING},
    ],
)
def test_saving_is_not_planned_for_weights_that_a_library_rebuilds(sharded: dict[str, object]) -> None:
    """Other libraries gather shards in ways of their own, and pack quantized weights to save them."""
    assert phases(JOB.replace(**sharded), *EVENTS, *END)["saving"] == (None, None)


def test_a_checkpoint_of_quantized_weights_has_the_trained_weights_alone() -> None:
    """Adapters, which are as large as their gradients, are loaded with their state."""
    events: tuple[Event, ...] = (
        *(*EVENTS[:4], PhaseStart(1, Phase.BACKWARD), alloc(7, 3 * MIB, category=Category.GRADIENT)),
        *(PhaseStart(1, Phase.OPTIMIZER), alloc(2, 10 * MIB, category=Category.OPTIMIZER), Free(7), Free(1)),
        *(PhaseStart(2, Phase.INPUTS), alloc(3, 14 * MIB), Free(3)),
    )
    found = phases(JOB.replace(quantize=Quantize.NF4), *events, *END)
    assert (found["saving"][0], found["resuming"][0]) == (43, 43)


def test_phases_of_zero() -> None:
    """States that sharding allocates are not loaded beside themselves; gathering has its own peak."""
    events: tuple[Event, ...] = (
        *(*EVENTS[:2], alloc(8, 5 * MIB, category=Category.OPTIMIZER), *EVENTS[2:]),
        *(PhaseStart(2, Phase.GATHERING), alloc(4, 22 * MIB), Free(4)),
    )
    found = phases(JOB.replace(deepspeed="{}", world_size=2), *events, *END)
    sizes = {name: allocated for name, (allocated, _) in found.items()}
    assert sizes == {
        **{"loading": 35, "first_step": 57, "later_steps": 60, "evaluation": None},
        **{"saving": 47, "gathering": 67, "resuming": 45},
    }


def test_inference_has_no_phases_of_training() -> None:
    """A model that does not train is loaded and run."""
    assert [*phases(JOB.replace(mode=Mode.INFER), *EVENTS, *END)] == ["loading", "first_step", "later_steps"]


def test_a_phase_that_no_event_shows_is_not_planned() -> None:
    """A trace that ends in the first step tells nothing of later ones."""
    planned = {of.phase for of in phases_of(JOB, *EVENTS[:7]) if of.is_planned}
    assert planned == {JobPhase.LOADING, JobPhase.FIRST_STEP}
    assert not JobPhasePeak(JobPhase.SAVING).is_planned
