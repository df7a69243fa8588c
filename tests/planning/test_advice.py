"""The smallest changes that make a batch fit."""

from collections.abc import Iterator
from itertools import combinations

import pytest

from planner.allocator.config import MIB, AllocatorConfig
from planner.api.advise import advise as advise_model
from planner.api.estimate import estimate as estimate_model
from planner.errors import ModelError
from planner.hardware.budget import Budget, make_budget
from planner.hardware.device import Device, SourcedBytes
from planner.jobs import (
    Checkpoint,
    Job,
    Loss,
    Mode,
    Offload,
    Optimizer,
    OptimizerImpl,
    Precision,
    TensorSpec,
    ZeroGrad,
)
from planner.planning import changes as changes_module
from planner.planning.advice import Advice, TracerFactory, advise
from planner.planning.changes import TrainingConfig, apply_all, changes_for
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace
from planner.report.commands.advise import advice_document, advice_to_json
from planner.report.plain import render_plain
from tests.helpers.structs import replace

JOB = Job.create(
    "toy", inputs=(TensorSpec((3, 8, 8)),), target=TensorSpec((), "int64"), optimizer=Optimizer.ADAMW
)
RECIPE = TrainingConfig(JOB, 8, AllocatorConfig())
AMPERE = (8, 6)


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of fine-tuning is installed."""
    monkeypatch.setattr(changes_module, "installed_version", lambda name: None)


def card(capacity_mib: int) -> Budget:
    """A GPU without uncertainty or context that leaves so much to the allocator."""
    usable = SourcedBytes(capacity_mib * MIB, "made up")
    device = Device("card", usable, usable, SourcedBytes(0, "made up"), AMPERE)
    return make_budget(device, 0.5, AllocatorConfig())


def state_of(training: TrainingConfig) -> int:
    """MiB of the toy's optimizer state: 40, or none with Adafactor."""
    return 0 if training.job.loop.optimizer is Optimizer.ADAFACTOR else 40


def needs(training: TrainingConfig) -> int:
    """MiB of the toy: its state, and 20 a sample, halved by bf16 and by checkpoints."""
    sample = 20
    sample //= 2 if training.job.loop.precision is not Precision.FP32 else 1
    sample //= 2 if training.job.loop.checkpoint is Checkpoint.BLOCKS else 1
    return state_of(training) + sample * training.batch


def toy(training: TrainingConfig) -> Iterator[Event]:
    """The blocks of what the toy needs."""
    state = state_of(training)
    yield PhaseStart(1, Phase.FORWARD)
    if state:
        yield Alloc(1, state * MIB, Category.OPTIMIZER, 0)
    yield Alloc(0, (needs(training) - state) * MIB, Category.ACTIVATION, 0)
    yield PhaseStart(1, Phase.END)


def tracer_of(training: TrainingConfig) -> TracerFactory:
    """A tracer, as `advise` opens one."""
    return lambda batch: Trace(tuple(toy(replace(training, batch=batch))), (Site("", "relu"),), batch)  # type: ignore[return-value]


def advised(capacity_mib: int) -> Advice:
    return advise(RECIPE, card(capacity_mib), tracer_of)  # type: ignore[arg-type]


def names(advice: Advice) -> list[tuple[str, ...]]:
    return [tuple(change.name for change in attempt.changes) for attempt in advice.sets]


def test_what_fits_needs_no_change() -> None:
    """For a batch that fits, no set is searched, and each single change still has its saving."""
    advice = advised(200)
    assert advice.unchanged.fits
    assert advice.unchanged.needed_bytes == 200 * MIB
    assert advice.sets == ()
    saved = {attempt.changes[0].name: 200 - attempt.needed_bytes // MIB for attempt in advice.singles}
    assert saved == {
        "--alloc-conf expandable_segments:True": 0,
        "--compile": 0,
        "--memory-format channels_last": 0,
        "--precision amp-bf16": 80,
        "--checkpoint blocks": 80,
        "--accumulate 2 --batch 4": 80,
        "--optimizer adafactor": 40,
        "--offload activations": 0,
        "--precision bf16": 80,
    }
    reason = "no more than 0 MiB are saved, since memory peaks outside of the optimizer's step"
    assert advice.failed == (("--optimizer-impl fused", reason), ("--optimizer-impl for-loop", reason))


def test_changes_to_the_step_are_tried_if_it_can_matter() -> None:
    """If a step takes 90 MiB beside 80 of weights and state, other steps and optimizers are traced.

    Adafactor is traced with its default implementation, for-loop.
    """

    def stepping(training: TrainingConfig) -> TracerFactory:
        job = training.job
        state = 0 if job.loop.optimizer is Optimizer.ADAFACTOR else 40
        temporary = 90 if job.loop.optimizer_impl is OptimizerImpl.FOREACH else 10
        events = (
            PhaseStart(0, Phase.SETUP),
            Alloc(0, 40 * MIB, Category.PARAMETER, 0),
            PhaseStart(1, Phase.OPTIMIZER),
            *([Alloc(1, state * MIB, Category.OPTIMIZER, 0)] if state else []),
            Alloc(2, temporary * MIB, Category.TEMPORARY, 0),
            Free(2),
            PhaseStart(1, Phase.END),
        )
        return lambda batch: Trace(events, (Site("", "relu"),), batch)

    advice = advise(RECIPE, card(60), stepping)
    saved = {attempt.changes[0].name: 170 - attempt.needed_bytes // MIB for attempt in advice.singles}
    assert saved["--optimizer-impl fused"] == 80
    assert saved["--optimizer adafactor"] == 120
    assert advice.failed == ()


def test_a_fraction_bounds_the_allocator() -> None:
    """Half of a GPU of 260 MiB is as much as a GPU of 130, though the configuration bounds it."""
    half = AllocatorConfig(per_process_memory_fraction=0.5)
    budget = make_budget(card(260).device, 0.5, half)
    advice = advise(replace(RECIPE, config=half), budget, tracer_of)  # type: ignore[arg-type]
    assert names(advice) == names(advised(130))
    assert advice.unchanged.needed_bytes == 200 * MIB
    assert advice.available_bytes == 130 * MIB


def test_single_changes_that_are_enough() -> None:
    """If one change is enough, no set contains it beside another, and the mildest comes first."""
    advice = advised(130)
    assert names(advice)[:3] == [
        ("--precision amp-bf16",),
        ("--checkpoint blocks",),
        ("--accumulate 2 --batch 4",),
    ]
    enough = {name for (name,) in (some for some in names(advice) if len(some) == 1)}
    assert not any(enough & set(some) for some in names(advice) if len(some) > 1)


def test_pairs_are_minimal_and_fit() -> None:
    """If one change is not enough, the sets fit, none contains another, groups are not mixed."""
    advice = advised(82)
    assert set(names(advice)) == {
        ("--accumulate 4 --batch 2",),
        ("--precision amp-bf16", "--checkpoint blocks"),
        ("--precision amp-bf16", "--accumulate 2 --batch 4"),
        ("--precision amp-bf16", "--optimizer adafactor"),
        ("--checkpoint blocks", "--accumulate 2 --batch 4"),
    }
    assert all(needs(attempt.training) * MIB == attempt.needed_bytes <= 82 * MIB for attempt in advice.sets)
    made = [set(some) for some in names(advice)]
    assert not any(one < other for one in made for other in made)
    groups = [[change.group for change in attempt.changes] for attempt in advice.sets]
    assert all(len(set(some)) == len(some) for some in groups)


def test_sets_whose_parts_save_too_little_are_not_traced() -> None:
    """Half of 160 MiB of activations and all of 40 of state leave 80, which do not fit 35 MiB; what
    checkpoints leave, smaller batches halve.
    """
    traced: list[tuple[int, Precision, Checkpoint, str]] = []

    def watched(training: TrainingConfig) -> TracerFactory:
        job = training.job
        traced.append((training.batch, job.loop.precision, job.loop.checkpoint, str(job.loop.optimizer)))
        return tracer_of(training)

    advice = advise(RECIPE, card(35), watched)  # type: ignore[arg-type]
    assert (8, Precision.AMP_BF16, Checkpoint.NONE, "adafactor") not in traced
    assert (2, Precision.FP32, Checkpoint.BLOCKS, "adafactor") in traced
    assert ("--checkpoint blocks", "--accumulate 4 --batch 2", "--optimizer adafactor") in names(advice)


def test_sets_are_sorted_by_size_then_mildness() -> None:
    """Small sets come before large ones, and among sets of one size the mild ones."""
    costs = [attempt.cost for attempt in advised(82).sets]
    assert costs == sorted(costs)


def test_nothing_helps() -> None:
    """A GPU too small for everything gives no set, and the advice notes it."""
    advice = advised(3)
    assert advice.sets == ()
    assert "No set of up to three changes makes it fit" in render_plain(advice_document(advice, 0.0))


def test_change_that_the_model_refuses() -> None:
    """A change that cannot be traced is listed with its reason and enters no set."""

    def refuse_checkpoints(training: TrainingConfig) -> TracerFactory:
        if training.job.loop.checkpoint is Checkpoint.BLOCKS:
            raise ModelError("toy: no repeated blocks were found")
        return tracer_of(training)

    advice = advise(RECIPE, card(130), refuse_checkpoints)  # type: ignore[arg-type]
    assert ("--checkpoint blocks", "toy: no repeated blocks were found") in advice.failed
    assert not any("--checkpoint blocks" in some for some in names(advice))


def test_unchanged_recipe_that_cannot_be_traced() -> None:
    """A failure of the training itself is the error."""

    def refuse(training: TrainingConfig) -> TracerFactory:
        raise ModelError("toy: fails")

    with pytest.raises(ModelError, match="toy: fails"):
        advise(RECIPE, card(130), refuse)


@pytest.mark.parametrize(
    ("job", "capability", "offered"),
    [
        (
            JOB.replace(inputs=(TensorSpec((128,), "int64"),), mode=Mode.INFER),
            (8, 0),
            {"allocator", "precision"},
        ),
        (JOB.replace(inputs=(TensorSpec((128,), "int64"),), mode=Mode.INFER), (6, 1), {"allocator"}),
        (
            JOB.replace(model="diffusers:AutoencoderKL", mode=Mode.INFER, precision=Precision.BF16),
            (8, 0),
            {"allocator", "layout", "enable_slicing", "enable_tiling"},
        ),
        (
            JOB.replace(
                optimizer=Optimizer.SGD, optimizer_impl=OptimizerImpl.FUSED, precision=Precision.BF16
            ),
            (9, 0),
            {"allocator", "layout", "checkpoint", "offload", "accumulation"},
        ),
        (
            JOB.replace(keep_grads=True, checkpoint=Checkpoint.BLOCKS, offload=Offload.ACTIVATIONS),
            (7, 5),
            {"allocator", "gradients", "layout", "precision", "accumulation", "optimizer"},
        ),
    ],
)
def test_only_changes_that_make_sense(job: Job, capability: tuple[int, int], offered: set[str]) -> None:
    """A change that the job has already, or that the GPU or the mode lacks, is not offered."""
    assert {change.group for change in changes_for(replace(RECIPE, job=job), capability)} == offered


@pytest.mark.parametrize(
    ("job", "offered"),
    [
        (JOB, {"--optimizer bitsandbytes.optim.AdamW8bit"}),
        (
            JOB.replace(model="hf:gpt2", loss=Loss.OUTPUT),
            {
                *("--optimizer bitsandbytes.optim.AdamW8bit", "--liger", "--peft lora"),
                "--peft lora --quantize nf4",
            },
        ),
        (
            JOB.replace(model="hf:gpt2", loss=Loss.OUTPUT, optimizer=Optimizer.SGD, peft="lora", liger=True),
            {"--quantize nf4"},
        ),
        (JOB.replace(model="f.py:Lit", loss=Loss.TRAINING_STEP), set()),
        (JOB.replace(model="f.py:Gan", mode=Mode.STEP), set()),
    ],
)
def test_installed_libraries_are_offered(
    monkeypatch: pytest.MonkeyPatch, job: Job, offered: set[str]
) -> None:
    """What bitsandbytes, Liger and peft would change, for the models that they know and the loops of ours."""
    plain = {change.name for change in changes_for(replace(RECIPE, job=job), AMPERE)}
    monkeypatch.setattr(changes_module, "installed_version", lambda name: "1.0")
    installed = {change.name for change in changes_for(replace(RECIPE, job=job), AMPERE)}
    assert installed - plain == offered


def test_changes_change_the_recipe() -> None:
    """Every change makes another training, and changes of different groups can be made in any order."""
    changes = changes_for(
        training := replace(RECIPE, job=JOB.replace(zero_grad=ZeroGrad.BEFORE_BACKWARD)), AMPERE
    )
    for change in changes:
        assert change.apply(training) != training
    for one, other in combinations(changes, 2):
        if one.group != other.group:
            assert apply_all(training, (one, other)) == apply_all(training, (other, one))


def test_json_says_what_the_text_says() -> None:
    """The JSON has every set with its options and the estimate of each."""
    advice = advised(82)
    fields = advice_to_json(advice, 0.0)
    assert fields["needed_mib"] == 200.0
    assert fields["available_mib"] == 82.0
    assert [tuple(change["option"] for change in one["changes"]) for one in fields["sets"]] == names(advice)
    assert all(one["estimate"]["fits"] == "yes" for one in fields["sets"])
    text = render_plain(advice_document(advice, 0.0))
    assert all(name in text for some in names(advice) for name in some)


@pytest.mark.slow
def test_vit_at_512_on_24_gb() -> None:
    """For ViT-B/16 at batch 512 on a 24 GB GPU three sets and more fit when planned again."""
    result = advise_model("vit_b_16", 512, gpu="RTX 4090")
    assert len(result.advice.sets) >= 3
    for attempt in result.advice.sets[:3]:
        conf = "expandable_segments:True" if attempt.training.config.expandable_segments else None
        again = estimate_model(attempt.training.job, attempt.training.batch, gpu="RTX 4090", alloc_conf=conf)
        assert again.fits != "no"


def test_each_recipe_is_one_run_and_each_reason_one_line() -> None:
    """No program is built for a single batch size; changes that fail alike share a line."""
    from torch import nn

    from planner.report.commands.advise import refusals

    texts: list[str] = []
    advise_model(lambda: nn.Linear(8, 8), 2, input="8", loss="sum", gpu="T4", on_progress=texts.append)
    assert any(text.startswith("trying ") for text in texts)
    assert not [text for text in texts if text.startswith("tracing batch")]
    failed = [("--a", "no blocks"), ("--b 1", "no GPU"), ("--c", "no blocks")]
    assert refusals(failed) == (
        "--a and --c are out of the question: no blocks",
        "--b 1 is out of the question: no GPU",
    )
