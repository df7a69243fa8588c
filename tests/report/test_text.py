"""The reports, from plans of a small hand-written trace; no torch."""

import json
from decimal import Decimal

import pytest
from hypothesis import given, strategies as st

from planner.allocator.config import AllocatorConfig, MemoryLimits
from planner.errors import UsageError
from planner.hardware.budget import Budget
from planner.hardware.device import MIB, Device, FigureKind, SourcedBytes, unlimited_device
from planner.hardware.likeness import likeness_of
from planner.jobs import (
    Checkpoint,
    ClipGradients,
    Job,
    Loss,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    TensorSpec,
    ZeroGrad,
)
from planner.jobs.codec import job_from_json, job_to_json
from planner.planning.estimate import Answer
from planner.planning.search.max_batch import Estimate, Plan, Seconds, estimate_batch, find_max_batch
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from planner.program.program import AffineAlloc
from planner.report.assumptions import assumptions
from planner.report.commands.estimates.estimate import estimate_document, estimate_to_json
from planner.report.commands.max_batch import plan_document, plan_to_json
from planner.report.document import Document, Entry
from planner.report.plain import WIDTH, render_plain
from planner.report.units import mib_parts
from tests.helpers.golden import FOLDER as GOLDEN, expected
from tests.helpers.structs import replace
from tests.helpers.traces import OneProgram, program_of

GOLDEN_NAMES = sorted(path.stem for name in ("estimate", "max_batch") for path in (GOLDEN / name).iterdir())

JOB = Job.create(
    model="toy",
    source="zoo:Toy",
    model_args=(("channels", (3, 5)), ("bias", True)),
    inputs=(TensorSpec((3, 224, 224)),),
    target=TensorSpec((), "int64"),
    optimizer=Optimizer.ADAM,
    steps=2,
)
CARD = Device(
    name="Card 1",
    total=SourcedBytes(1024 * MIB, "nvidia-smi", kind=FigureKind.PUBLISHED),
    usable=SourcedBytes(800 * MIB, "torch's log", 10 * MIB, FigureKind.PUBLISHED),
    context=SourcedBytes(300 * MIB, "one measurement", 20 * MIB, FigureKind.MEASURED),
    capability=(8, 6),
    capability_source="NVIDIA's table",
)
CONTEXT = SourcedBytes(300 * MIB, "one measurement", 20 * MIB, FigureKind.MEASURED)

# Two steps of a model with 30 MiB of weights: a forward pass that takes two times 5 MiB a sample on the way,
# activations of 7 MiB a sample, gradients, and the optimizer's state after the first step.
SITES = (Site("fc", "to"), Site("", "aten.empty.memory_format"), Site("fc", "aten.addmm.default"))
EVENTS = (
    *(PhaseStart(0, Phase.SETUP), Alloc(0, 30 * MIB, Category.PARAMETER, 0)),
    *(PhaseStart(1, Phase.INPUTS), AffineAlloc(1, 0, MIB, Category.INPUT, 1)),
    *(PhaseStart(1, Phase.FORWARD), Alloc(2, 8 * MIB, Category.WORKSPACE, 2)),
    *(
        AffineAlloc(3, 0, 5 * MIB, Category.TEMPORARY, 2),
        AffineAlloc(10, 0, 5 * MIB, Category.TEMPORARY, 2),
        Free(3),
        Free(10),
    ),
    AffineAlloc(4, 0, 7 * MIB, Category.ACTIVATION, 2),
    *(PhaseStart(1, Phase.BACKWARD), Alloc(5, 30 * MIB, Category.GRADIENT, 2), Free(4)),
    *(PhaseStart(1, Phase.OPTIMIZER), Alloc(6, 60 * MIB, Category.OPTIMIZER, 1), Free(1)),
    *(PhaseStart(2, Phase.INPUTS), AffineAlloc(7, 0, MIB, Category.INPUT, 1)),
    *(PhaseStart(2, Phase.FORWARD), AffineAlloc(8, 0, 5 * MIB, Category.TEMPORARY, 2), Free(8)),
    *(AffineAlloc(9, 0, 7 * MIB, Category.ACTIVATION, 2), PhaseStart(2, Phase.BACKWARD), Free(9)),
    *(PhaseStart(2, Phase.OPTIMIZER), PhaseStart(2, Phase.END)),
)
# A step whose second block is larger than the first, which the allocator has cached: below 120 MiB even one
# sample takes a retry.
GROWING = (
    *(PhaseStart(0, Phase.SETUP), Alloc(0, 30 * MIB, Category.PARAMETER, 0), PhaseStart(1, Phase.FORWARD)),
    *(
        AffineAlloc(1, 40 * MIB, MIB, Category.TEMPORARY, 2),
        Free(1),
        AffineAlloc(2, 50 * MIB, MIB, Category.ACTIVATION, 2),
    ),
    PhaseStart(1, Phase.END),
)
UNKNOWN_OPS = ("aten.convolution.default", "aten.sum.dim_IntList")
NOTES = ("traced with PyTorch 9.9",)


def traced(batch: int, events: tuple[Alloc | AffineAlloc | Free | PhaseStart, ...] = EVENTS) -> Trace:
    """Return the trace as if recorded at this batch size."""
    return program_of(events, SITES, UNKNOWN_OPS, NOTES).instantiate(batch)


def budget(capacity_mib: int | None, device: Device = CARD) -> Budget:
    """A GPU whose allocator may take this much at the confidence, and most likely 5 % more: judged already,
    so that the memory limits stay.
    """
    if capacity_mib is not None:
        likely_mib = round(1.05 * capacity_mib)
        device = replace(device, usable=replace(device.usable, value=(300 + likely_mib) * MIB))
    limits = MemoryLimits(None if capacity_mib is None else capacity_mib * MIB, None, None, AllocatorConfig())
    return Budget(device, 0.99, None, limits, None, likeness_of(JOB, traced(2), device.capability))


def estimated(batch: int, card: Budget, job: Job = JOB) -> Estimate:
    """Return an estimate whose every figure is the same each time, for any published runs of `budget`."""
    return pinned(estimate_batch(job, traced(batch), card))


def planned(card: Budget, events: tuple[Alloc | Free | PhaseStart, ...] = EVENTS) -> Plan:
    """A plan, as repeatable."""
    plan = find_max_batch(JOB, card, OneProgram(program_of(events, SITES, UNKNOWN_OPS, NOTES)))
    return replace(
        plan,
        at_max=plan.at_max and pinned(plan.at_max),
        at_comfortable=plan.at_comfortable and pinned(plan.at_comfortable),
        first_failure=plan.first_failure and pinned(plan.first_failure),
        seconds=Seconds(2.25, 0.5),
    )


def refusing_retries(card: Budget, events: tuple[Alloc | Free | PhaseStart, ...] = EVENTS) -> Plan:
    """Return the plan for a user to whom retries are no answer."""
    return replace(planned(card, events), no_retries=True)


def pinned(one: Estimate) -> Estimate:
    """The estimate with its time, its upper bound and its risk, if it has one, set to something known."""
    upper_bytes = one.process_bytes + 10 * MIB
    unlikely = 0.9 if one.answer is Answer.DOES_NOT_FIT else 0.4
    chance = None if one.p_out_of_memory is None else unlikely if one.failed else 0.004
    return replace(one, process_upper_bytes=upper_bytes, seconds=Seconds(2.25, 0.5), p_out_of_memory=chance)


def unlimited() -> Device:
    """Return a device without a limit, with the context of the GPU above."""
    return replace(unlimited_device(), context=CONTEXT)


def reports() -> dict[str, str]:
    """Every kind of report."""
    cap = replace(budget(None, unlimited()), cap_bytes=400 * MIB, limits=MemoryLimits(limit_bytes=390 * MIB))
    both = replace(budget(450), cap_bytes=400 * MIB, limits=MemoryLimits(450 * MIB, 390 * MIB))
    constant = tuple(event for event in EVENTS if not isinstance(event, AffineAlloc))
    dead = {event.block for event in EVENTS if isinstance(event, AffineAlloc)}
    constant = tuple(event for event in constant if not (isinstance(event, Free) and event.block in dead))
    return {
        "max_batch": render_plain(plan_document(planned(budget(450)), 1.5)),
        "max_batch_no_retries": render_plain(plan_document(refusing_retries(budget(450)), 1.5)),
        "max_batch_only_with_retries": render_plain(plan_document(planned(budget(100), GROWING), 1.5)),
        "max_batch_none_without": render_plain(plan_document(refusing_retries(budget(100), GROWING), 1.5)),
        "max_batch_none_fits": render_plain(plan_document(planned(budget(20)), 1.5)),
        "max_batch_endless": render_plain(plan_document(planned(budget(450), constant), 1.5)),
        "max_batch_cap": render_plain(plan_document(planned(cap), 1.5)),
        "estimate_fits": render_plain(estimate_document(estimated(20, budget(450)), 1.5)),
        "estimate_with_retries": render_plain(estimate_document(estimated(24, budget(450)), 1.5)),
        "estimate_no": render_plain(estimate_document(estimated(50, both), 1.5)),
        "estimate_no_gpu": render_plain(estimate_document(estimated(20, budget(None, unlimited())), 1.5)),
    }


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_text(name: str) -> None:
    """Each report reads, to the letter, as its golden file."""
    folder = "max_batch" if name.startswith("max_batch") else "estimate"
    text = reports()[name] + "\n"
    assert text == expected(f"{folder}/{name}.txt", text)


def test_every_report_has_a_golden_file() -> None:
    """No kind of report is without a golden file, and no file without a report."""
    assert sorted(reports()) == GOLDEN_NAMES


def test_text_fits_a_terminal() -> None:
    """No line of any report is longer than 100 columns or ends in a blank."""
    lines = [line for report in reports().values() for line in report.splitlines()]
    assert [line for line in lines if len(line) > WIDTH or line != line.rstrip()] == []


def test_estimate_as_json() -> None:
    """The JSON of an estimate that does not fit: the failure on the GPU, the peaks without a limit."""
    fields = estimate_to_json(estimated(50, budget(450)), 1.5)
    assert fields == {
        "schema": 1,
        "model": "toy",
        "torch": "2.13",
        "batch": 50,
        "method": "trace",
        "job": job_to_json(JOB),
        "device": {
            "name": "Card 1",
            "total_mib": 1024.0,
            "usable_mib": 772.0,
            "context_mib": 300.0,
            "capability": [8, 6],
            "sources": {
                "total": "nvidia-smi",
                "usable": "torch's log",
                "context": "one measurement",
                "capability": "NVIDIA's table",
            },
            "kinds": {"total": "published", "usable": "published", "context": "measured"},
            "spreads_mib": {"total": 0.0, "usable": 10.0, "context": 20.0},
            "nccl": None,
            "allocator": {
                "capacity_mib": 450.0,
                "limit_mib": None,
                "cap_mib": None,
                "rules": {
                    "max_split_bytes": None,
                    "max_non_split_rounding_bytes": 20 * MIB,
                    "large_segment_bytes": 20 * MIB,
                    "roundup_power2_divisions": [0] * 16,
                    "garbage_collection_threshold": 0.0,
                    "expandable_segments": False,
                    "per_process_memory_fraction": 1.0,
                    "throw_on_cudamalloc_oom": False,
                    "reuse_order": "oldest segment",
                },
            },
        },
        "confidence": 0.99,
        "peak_allocated_mib": 588.0,
        "peak_reserved_mib": 950.0,
        "peak_first_step_mib": 588.0,
        "peak_later_steps_mib": 528.0,
        "peak_reserved_first_step_mib": 950.0,
        "peak_reserved_later_steps_mib": 950.0,
        "phases": [
            {"name": name, "peak_allocated_mib": allocated, "peak_reserved_mib": reserved, "covered": planned}
            for name, allocated, reserved, planned in (
                ("loading", 30.0, 30.0, True),
                ("first_step", 588.0, 950.0, True),
                ("later_steps", 528.0, 950.0, True),
                ("evaluation", None, None, False),
                ("saving", 178.0, 950.0, True),
                ("resuming", 120.0, 120.0, True),
            )
        ],
        "end_allocated_mib": 178.0,
        "process_mib": 1250.0,
        "process_upper_mib": 1260.0,
        "pinned_host_mib": 0.0,
        "host": {
            "weights_mib": 30.0,
            "batch_mib": 50.0,
            "checkpoint_mib": 90.0,
            "saving_mib": 60.0,
            "pinned_mib": 0.0,
        },
        "fits": "no",
        "answer": "does_not_fit",
        "fits_until_step": None,
        "p_out_of_memory": 0.9,
        "risk": {
            "kind": "fixed sizes",
            "runs": "transformers and a CNN on a T4 (torch 2.11, mixed precision, batches of fixed sizes)",
            "outcomes": 0,
            "peaks": 8,
            "location": 0.0,
            "scale": fields["risk"]["scale"],
            "departures": ["with operators whose scratch memory is not known"],
            "unlike": [],
            "lengths": "fixed",
            "parts": [
                {
                    "what": "fixed sizes",
                    "scale": 0.01252,
                    "rests_on": fields["risk"]["runs"],
                },
                {
                    "what": "with operators whose scratch memory is not known",
                    "scale": 0.01561,
                    "rests_on": "the means of these kinds of runs on each GPU",
                },
            ],
        },
        "retries": 1,
        "ranks": [],
        "retry_costs": [],
        "retry_costs_at_confidence": [],
        "failure": {
            "step": 1,
            "phase": "forward",
            "module": "fc",
            "op": "aten.addmm.default",
            "requested_mib": 250.0,
        },
        "breakdown_mib": {
            "context": 300.0,
            "parameters": 30.0,
            "gradients": 0.0,
            "optimizer": 0.0,
            "inputs": 50.0,
            "activations": 0.0,
            "temporaries": 500.0,
            "workspaces": 8.0,
            "fragmentation": 362.0,
        },
        "calibration": None,
        "growth": None,
        "assumptions": [
            "the CUDA context takes 300 +- 20 MiB: one measurement",
            "no calibration is stored for this job and GPU; margins and probability rest on 8 peaks of "
            "transformers and a CNN on a T4 (torch 2.11, mixed precision, batches of fixed sizes): +0.0%, "
            "1.3% deviation; in addition 1.6% with operators whose scratch memory is not known: 2.0% in all",
            "memory is taken as by torch 2.13",
            "nothing else runs on the GPU; no autocast, tensors keep the types that the model gives them",
            "2 steps, gradients set to None before each forward pass; each batch is released before the next "
            "is copied, output and loss live until the next are there",
            "traced with PyTorch 9.9",
            "scratch memory is not counted for convolution, sum.dim_IntList",
        ],
        "unknown_ops": ["aten.convolution.default", "aten.sum.dim_IntList"],
        "seconds": {"import": 1.5, "trace": 2.25, "replay": 0.5},
    }


def test_plan_as_json() -> None:
    """The JSON of a plan holds the estimates on both sides of the answer and every probe."""
    plan = planned(budget(450))
    assert plan.at_max is not None
    assert plan.at_comfortable is not None and plan.first_failure is not None
    assert plan_to_json(plan, 1.5) == {
        "schema": 1,
        "model": "toy",
        "torch": "2.13",
        "method": "trace",
        "job": job_to_json(JOB),
        "device": estimate_to_json(plan.at_max, 1.5)["device"],
        "confidence": 0.99,
        "max_batch": 24,
        "comfortable_batch": 22,
        "multiple_of": 1,
        "no_retries": False,
        "answer_batch": 22,
        "at_max": estimate_to_json(plan.at_max, 1.5),
        "at_comfortable": estimate_to_json(plan.at_comfortable, 1.5),
        "first_failure": estimate_to_json(plan.first_failure, 1.5),
        "probes": [[batch, outcome.value] for batch, outcome in plan.search.probes],
        "seconds": {"import": 1.5, "trace": 2.25, "replay": 0.5},
    }
    assert plan_to_json(plan, 1.5)["at_max"]["batch"] == 24
    assert plan_to_json(plan, 1.5)["at_max"]["fits"] == "with_retries"
    assert plan_to_json(plan, 1.5)["first_failure"]["batch"] == 25
    assert [24, "with_retries"] in plan_to_json(plan, 1.5)["probes"]


def test_plan_of_nothing_as_json() -> None:
    """The largest batch is 0 and has no estimate if not even 1 fits."""
    fields = plan_to_json(planned(budget(20)), 1.5)
    assert (fields["max_batch"], fields["comfortable_batch"], fields["at_max"]) == (0, 0, None)
    assert fields["first_failure"]["batch"] == 1


def test_no_gpu_as_json() -> None:
    """Memory without end is null in JSON, not a number."""
    device = estimate_to_json(estimated(20, budget(None, unlimited())), 1.5)["device"]
    assert (device["total_mib"], device["usable_mib"], device["context_mib"]) == (None, None, 300.0)
    assert device["allocator"]["capacity_mib"] is None


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=9), st.integers(0, 3))
def test_rounded_parts_add_up(sizes: list[int], digits: int) -> None:
    """Parts rounded to MiB add up, in decimals, to the rounded sum, and none moves by a whole unit."""
    parts = mib_parts({str(index): size for index, size in enumerate(sizes)}, digits)
    whole = round(sum(sizes) / MIB, digits)
    assert sum(Decimal(str(part)) for part in parts.values()) == Decimal(str(whole))
    for size, part in zip(sizes, parts.values(), strict=True):
        assert abs(part - size / MIB) <= 1.001 / 10**digits
        assert size or not part


@given(st.integers(1, 10**6), st.integers(0, 10**9), st.integers(0, 10**9))
def test_breakdown_of_json_adds_up(batch: int, fixed_bytes: int, context_bytes: int) -> None:
    """The breakdown in the JSON adds up to `process_mib`, whatever the sizes."""
    card = budget(None, replace(unlimited(), context=replace(CONTEXT, value=context_bytes)))
    events = (PhaseStart(0, Phase.SETUP), Alloc(0, fixed_bytes + 1, Category.PARAMETER, 0), *EVENTS[2:])
    fields = estimate_to_json(estimate_batch(JOB, traced(batch, events), card), 1.5)
    parts = [Decimal(str(part)) for part in fields["breakdown_mib"].values()]
    assert sum(parts) == Decimal(str(fields["process_mib"]))


JOBS = st.builds(
    Job.create,
    model=st.text(min_size=1),
    model_args=st.just((("depth", (1, (2, "a"))), ("rate", 0.5), ("bias", False), ("act", None))),
    inputs=st.just((TensorSpec((3, 4)), TensorSpec((), "int64", "ids"))),
    target=st.sampled_from((None, TensorSpec((10,)))),
    loss=st.sampled_from(Loss),
    mode=st.sampled_from(Mode),
    optimizer=st.sampled_from(Optimizer),
    optimizer_impl=st.sampled_from(OptimizerImpl),
    zero_grad=st.sampled_from(ZeroGrad),
    keep_grads=st.booleans(),
    steps=st.integers(1, 100),
    precision=st.sampled_from(Precision),
    grad_scaler=st.booleans(),
    memory_format=st.sampled_from(MemoryFormat),
    checkpoint=st.sampled_from(Checkpoint),
    accumulate=st.integers(1, 100),
    clip_gradients=st.sampled_from(ClipGradients),
    ema=st.booleans(),
    eval_batch=st.integers(0, 1000),
    dataset_size=st.integers(0, 10**7),
    ddp=st.booleans(),
    freeze=st.lists(st.text(min_size=1), max_size=2).map(tuple),
    new_tokens=st.integers(0, 100),
    cublas_workspace_config=st.sampled_from(("", ":4096:8", ":0:0")),
    source=st.text(),
)


@given(JOBS)
def test_job_survives_json(job: Job) -> None:
    """A job written as JSON text and read again is the same job."""
    assert job_from_json(json.loads(json.dumps(job_to_json(job)))) == job


OF_FIRST_VERSION = (
    *("model", "source", "model_args", "inputs", "target", "loss", "mode", "optimizer", "optimizer_impl"),
    *("zero_grad", "keep_grads", "steps"),
)


@pytest.mark.parametrize("key", OF_FIRST_VERSION)
def test_incomplete_job_is_refused(key: str) -> None:
    """A job whose JSON lacks a key that all files have is refused."""
    fields = job_to_json(JOB)
    with pytest.raises(KeyError):
        job_from_json({name: value for name, value in fields.items() if name != key})


def test_job_of_an_older_file_has_the_defaults() -> None:
    """Options that came later are read as their defaults where a file lacks them."""
    fields = job_to_json(JOB.replace(accumulate=4, ema=True))
    assert job_from_json({name: fields[name] for name in OF_FIRST_VERSION}) == JOB


@pytest.mark.parametrize("key", sorted(job_to_json(JOB)))
def test_broken_job_is_refused(key: str) -> None:
    """A job whose JSON has nonsense in it is refused."""
    with pytest.raises((UsageError, TypeError, AttributeError)):
        job_from_json(job_to_json(JOB) | {key: 7.5})


def loop_sentence(**options: object) -> str:
    changes: dict[str, object] = options
    job = JOB.replace(**changes)  # type: ignore[arg-type]
    return assumptions(estimated(2, budget(450), job))[4]


def test_assumed_loop() -> None:
    """The text describes the loop of the job."""
    assert loop_sentence(steps=1, keep_grads=True, zero_grad=ZeroGrad.AFTER_STEP) == (
        "1 step, gradients filled with zeros after each step of the optimizer; each batch is released before "
        "the next is copied, output and loss live until the next are there"
    )
    assert loop_sentence(mode=Mode.INFER) == (
        "2 steps in eval mode without gradients; each batch is released before the next is copied, the "
        "output lives until the next is there"
    )
    assert loop_sentence(mode=Mode.FORWARD) == (
        "2 steps in training mode with gradients recorded, no loss, no backward pass; each batch is released "
        "before the next is copied"
    )


def test_assumed_allocator() -> None:
    """Options of the allocator that differ from torch's defaults are listed."""
    card = replace(
        budget(450), limits=MemoryLimits(450 * MIB, config=AllocatorConfig(expandable_segments=True))
    )
    assert "the allocator runs with expandable_segments=True" in assumptions(estimated(2, card))


def test_names_of_entries_are_followed_by_a_space() -> None:
    """Names up to 14 letters are in a column of 16; longer names take what they need."""
    document = Document.of([Entry("Risk", "0.1 %"), Entry("Expandable segments", "146")])
    assert render_plain(document) == "Risk:           0.1 %\nExpandable segments: 146"
