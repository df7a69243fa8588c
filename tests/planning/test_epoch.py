"""Epochs whose last batch is smaller: put together from traces of one batch size, and planned for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner import advise, estimate, explain, gpus, max_batch
from planner.allocator.replay import replay_trace
from planner.api.compare import compare
from planner.capture.loop import batches as loop_batches
from planner.capture.techniques import recipe
from planner.errors import UsageError
from planner.hardware.calibration.lookup import is_same_job
from planner.hardware.database import find_device
from planner.jobs import ClipGradients, Job, Mode, Optimizer, Precision, ZeroGrad
from planner.planning.epoch import last_batch_size, with_last_batch
from planner.program.events import (
    Alloc,
    Category,
    Free,
    Outcome,
    Phase,
    PhaseStart,
    Site,
    Trace,
    validate,
)
from planner.store.fingerprint import fingerprint_of
from tests.helpers.command_line import outcome
from tests.helpers.models import job_of, trace_of
from tests.helpers.structs import replace

MIB = 2**20
BATCH = 32


class Net(nn.Module):
    """Convolution, normalisation, dropout and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8 * 14 * 14, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def training(**fields: object) -> Job:
    """Three steps with Adam."""
    fields = {"mode": Mode.TRAIN, "steps": 3, "optimizer": Optimizer.ADAM} | fields
    return job_of("3x16x16", **fields)


def traces(job: Job, build: Callable[[], nn.Module] = Net) -> Callable[[int], Trace]:
    """A tracer."""
    return lambda batch: trace_of(build, job, batch)


def really_run(job: Job, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> Trace:
    """The trace of a loop whose batches have these sizes, one after another."""
    coming = iter(sizes)
    usual = recipe.batch_loader

    def batches(model: nn.Module, job: Job, batch: int) -> Callable[[], object]:
        return lambda: usual(model, job, next(coming))()

    for module in (recipe, loop_batches):
        monkeypatch.setattr(module, "batch_loader", batches)
    trace = trace_of(Net, job, BATCH)
    assert next(coming, None) is None
    return trace


def story(trace: Trace) -> list[object]:
    """All events, blocks numbered by birth and places by name."""
    numbers: dict[int, int] = {}
    parts: list[object] = []
    for event in trace.events:
        if isinstance(event, Alloc):
            numbers[event.block] = len(numbers)
            parts.append((event.size_bytes, event.category, trace.sites[event.site], event.may_fail))
        elif isinstance(event, Free):
            parts.append(numbers[event.block])
        else:
            parts.append(event)
    return parts


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer": Optimizer.SGD, "zero_grad": ZeroGrad.AFTER_STEP},
        {"optimizer": Optimizer.MOMENTUM, "zero_grad": ZeroGrad.BEFORE_BACKWARD},
        {"keep_grads": True, "clip_gradients": ClipGradients.NORM},
        {"ema": True, "precision": Precision.AMP_FP16, "grad_scaler": True},
        {"ddp": True},
        {"mode": Mode.INFER},
        {"mode": Mode.FORWARD},
        {"optimizer": Optimizer.ADAFACTOR, "precision": Precision.BF16},
    ],
)
@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (32 * 7 + 9, [32, 32, 32, 9, 32]),
        (32 * 2 + 9, [32, 32, 9, 32]),
        (32 * 1 + 31, [32, 31, 32]),
    ],
)
def test_an_epoch_is_put_together_as_it_would_run(
    fields: dict[str, object], samples: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event by event what a run with such batches records: full steps, the smaller one, a full one."""
    job = training(**fields)
    whole = job.replace(dataset_size=samples)
    trace = with_last_batch(whole, BATCH, traces(whole))
    validate(trace)
    assert story(trace) == story(really_run(job.replace(steps=len(sizes)), sizes, monkeypatch))
    assert trace.batch == BATCH


def test_the_smaller_batch_is_the_last_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller batch is the last of those whose gradients are added up."""
    job = training(accumulate=2)
    trace = with_last_batch(job.replace(dataset_size=32 * 12 + 9), BATCH, traces(job))
    sizes = [32, 32, 32, 32, 32, 32, 32, 9, 32, 32]
    assert story(trace) == story(really_run(job.replace(steps=5), sizes, monkeypatch))


@pytest.mark.parametrize("eval_batch", [0, 50])
def test_the_evaluation_comes_after_the_smaller_batch(
    eval_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation runs as between epochs; its batches have their own size."""
    job = training(evaluate=True, eval_batch=eval_batch)
    trace = with_last_batch(job.replace(dataset_size=32 * 12 + 9), BATCH, traces(job))
    sizes = [32, 32, 32, 9, *[eval_batch or 32] * 2, 32]
    assert story(trace) == story(really_run(job.replace(steps=5), sizes, monkeypatch))


def test_notes_name_what_was_played() -> None:
    """A note has the sizes of the epoch's own last batch."""
    tracer = traces(training())

    def last_note(samples: int) -> str:
        return with_last_batch(training(dataset_size=samples), BATCH, tracer).notes[-1]

    assert last_note(1033) == (
        "an epoch of 1,033 samples ends with a batch of 9; it comes after 3 steps of full batches and before "
        "one more"
    )
    assert last_note(41) == (
        "an epoch of 41 samples ends with a batch of 9; it comes after 1 step of full batches and before "
        "one more"
    )
    assert last_note(1024) == "an epoch of 1,024 samples has full batches alone"
    assert with_last_batch(training(), BATCH, tracer) == tracer(BATCH)


class Token(nn.Module):
    """Puts a parameter before each sample; of one sample, its gradient is a view of a larger block."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def test_a_single_sample_may_make_another_gradient() -> None:
    """A lone sample's block takes the other's place, as for a vision transformer's class token."""
    job = job_of("7x16", mode=Mode.TRAIN, steps=3, dataset_size=65)
    full, alone = (trace_of(Token, job, batch) for batch in (64, 1))
    sizes = [
        sorted(e.size_bytes for e in one.events if isinstance(e, Alloc) and e.category is Category.GRADIENT)
        for one in (full, alone)
    ]
    assert sizes[0] != sizes[1] and len(sizes[0]) == len(sizes[1])
    trace = with_last_batch(job, 64, lambda batch: full if batch == 64 else alone)
    assert trace.notes[-1].endswith("it comes after 1 step of full batches and before one more")
    assert replay_trace(trace).end_allocated_bytes == replay_trace(full).end_allocated_bytes


class Fussy(nn.Module):
    """Does not take a single sample, as batch norm does not over one value; two take another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("expected more than 1 value per channel")
        if len(x) == 2:
            self.kept = self.second(x)
        return self.first(x)


def test_a_last_batch_that_fails_is_reported() -> None:
    """The rest of the epoch is planned without it."""
    job = job_of("16", mode=Mode.TRAIN, steps=3, dataset_size=65)
    trace = with_last_batch(job, 64, traces(job, Fussy))
    assert trace.events == traces(job, Fussy)(64).events
    assert trace.notes[-1].startswith(
        "an epoch of 65 samples ends with a batch of 1, which is not counted, since the model fails there: "
    )


def test_a_batch_above_the_epoch_is_refused() -> None:
    """A batch size above the epoch is refused, since no batch has it."""
    with pytest.raises(
        UsageError, match=r"^--batch 64 and --dataset-size 63: no batch is ever full; give at "
    ):
        estimate(Net, 64, input="3x16x16", loss="sum", dataset_size=63)
    for command in (advise, compare):
        with pytest.raises(UsageError, match="^--batch 64 and --dataset-size 63: "):
            command(Net, 64, input="3x16x16", loss="sum", dataset_size=63, gpu="L4")
    assert (
        last_batch_size(training(dataset_size=64), 64),
        last_batch_size(training(dataset_size=63), 64),
    ) == (0, 0)


# ---- plans


def by_hand(batch: int) -> Trace:
    """Three steps: one block of 8 MiB a sample for each step's length, one of 1 MiB that goes in the next."""
    events: list[Alloc | Free | PhaseStart] = [
        PhaseStart(0, Phase.SETUP),
        Alloc(0, MIB, Category.PARAMETER, 0),
    ]
    for step in (1, 2, 3):
        work, held = 10 * step, 10 * step + 1
        events += [PhaseStart(step, Phase.INPUTS), Alloc(work, 8 * MIB * batch, Category.TEMPORARY, 0)]
        events.append(Alloc(held, MIB * batch, Category.TEMPORARY, 0))
        events += [Free(held - 10)] if step > 1 else []
        events.append(Free(work))
    return Trace((*events, PhaseStart(3, Phase.END)), (Site("", "op"),), batch)


def test_a_smaller_batch_lifts_the_reserved_peak() -> None:
    """Five samples leave a block within the segment that six need whole, so these need another."""
    job = training(dataset_size=6 * 10 + 5)
    plain, epoch = (
        replay_trace(by_hand(6)),
        replay_trace(with_last_batch(job, 6, by_hand)),
    )
    assert plain.peak_allocated_bytes == epoch.peak_allocated_bytes == 61 * MIB
    assert (plain.peak_reserved_bytes, epoch.peak_reserved_bytes) == (70 * MIB, 118 * MIB)
    assert [peaks.reserved_bytes // MIB for peaks in epoch.step_peaks] == [70, 70, 70, 70, 118]


FILE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )
"""
JOB = {"input": "3x64x64", "target": "scalar:int64", "optimizer": "adam"}
SAMPLES = 1009


@pytest.fixture
def net(tmp_path: Path) -> str:
    """A model that may be cached."""
    (tmp_path / "net.py").write_text(FILE)
    return f"{tmp_path}/net.py:Net"


def test_plans_of_an_epoch_agree_however_the_traces_come(net: str, tmp_path: Path) -> None:
    """Recorded, stored and loaded traces give one answer; its epoch fits, its successor's does not."""
    card = {**JOB, "gpu_mib": 2000, "dataset_size": SAMPLES}
    results = [max_batch(net, cache=cache, **card) for cache in (None, tmp_path / "kept", tmp_path / "kept")]
    assert len({result.max_batch for result in results}) == 1
    assert len({result.plan.at_max.run for result in results if result.plan.at_max}) == 1
    largest = results[0].max_batch
    assert 1 < largest < SAMPLES and SAMPLES % largest
    for batch, fits in ((largest, True), (largest + 1, False)):
        alone = estimate(net, batch, **card).estimate
        assert (alone.outcome is not Outcome.DOES_NOT_FIT) is fits
        assert len(alone.run.step_peaks) == 5
    assert results[0].plan.at_max is not None
    assert any(f"ends with a batch of {SAMPLES % largest}" in note for note in results[0].plan.at_max.notes)


def test_all_estimators_beside_the_planner_of_the_epoch(net: str) -> None:
    """`compare` shows the planner's figures of `estimate`, which the last batch may raise."""
    options = {**JOB, "gpu_mib": 2000, "dataset_size": SAMPLES}
    run = estimate(net, 63, **options).estimate.run
    rows = {row.key: row.size_bytes for row in compare(net, 63, **options).comparison.rows}
    assert (rows["allocated"], rows["reserved"]) == (run.peak_allocated_bytes, run.peak_reserved_bytes)
    full = estimate(net, 63, **{**options, "dataset_size": None}).estimate.run
    assert full.peak_reserved_bytes != run.peak_reserved_bytes


def test_the_largest_batch_is_at_most_the_epoch(net: str) -> None:
    """No batch beyond the epoch is searched on a GPU that takes more."""
    result = max_batch(net, gpu_mib=80_000, dataset_size=50, **JOB)
    assert (result.max_batch, result.plan.first_failure) == (50, None)
    assert str(result).startswith("Largest batch:  50, the whole epoch at confidence 0.99")


@pytest.mark.slow
def test_every_card_answers_as_if_alone(net: str, tmp_path: Path) -> None:
    """`gpus` plans the same epochs, from cached traces and others; each GPU's last batch is its own."""
    cards = [replace(find_device(name)) for name in ("p40", "4090", "h100")]
    options = {**JOB, "allocator_cap_mib": 1200, "dataset_size": SAMPLES}
    alone = {card.name: max_batch(net, gpu=card, **options).max_batch for card in cards}
    for cache in (None, tmp_path / "kept"):
        table = gpus(net, devices=cards, cache=cache, **options)
        assert {fit.budget.device.name: fit.max_batch for fit in table.fits} == alone
    few = gpus(net, devices=cards, **{**options, "dataset_size": 40})
    assert {fit.max_batch for fit in few.fits} == {40}
    with pytest.raises(UsageError, match="^--batch 41 and --dataset-size 40: "):
        gpus(net, 41, devices=cards, **{**options, "dataset_size": 40})


@pytest.mark.slow
def test_a_saved_trace_takes_any_epoch(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The size of the epoch is no part of a trace: it may be given beside a file, or be in it already."""
    path, options = tmp_path / "it.json.gz", "--input 3x64x64 --target scalar:int64 --no-cache --json"
    assert outcome(f"estimate --model {net} --batch 64 {options} --save-trace {path}", capsys)[0] == 0
    code, out, _ = outcome(f"estimate --trace {path} --batch 64 --dataset-size 100 --json", capsys)
    assert (code, json.loads(out)["job"]["dataset_size"]) == (0, 100)
    direct = json.loads(outcome(f"estimate --model {net} --batch 64 --dataset-size 100 {options}", capsys)[1])
    assert json.loads(out)["peak_reserved_mib"] == direct["peak_reserved_mib"]
    assert any("ends with a batch of 36" in line for line in json.loads(out)["assumptions"])


def test_explained_epochs_have_their_details(net: str) -> None:
    """The steps of the epoch are listed one by one, and tensors at the peak with their shapes."""
    fields = explain(net, 64, dataset_size=SAMPLES, gpu_mib=8000, **JOB).to_dict()
    assert len({row["step"] for row in fields["phases"]} - {0}) == 5
    assert "epochs of 1,009 samples" in str(explain(net, 64, dataset_size=SAMPLES, gpu_mib=8000, **JOB))


def test_no_trace_and_no_calibration_depends_on_the_epoch() -> None:
    """One cached trace serves all epochs, and one calibration."""
    one, other = (training(model="torchvision:resnet18", dataset_size=size) for size in (0, 1000))
    assert fingerprint_of(one) == fingerprint_of(other)
    assert is_same_job(one, other)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--dataset-size 0", "--dataset-size: '0' is refused; use a whole number from 1 to 1125899906842624"),
        ("--dataset-size many", "--dataset-size: expected a whole number, got 'many'"),
        (
            "--dataset-size 100 --steps 1",
            "cnn: --dataset-size and --steps 1: the smaller batch comes between others; "
            "give at least --steps 2",
        ),
        (
            "--dataset-size 500 --steps 2 --eval-batch 8",
            "cnn: --dataset-size and --steps 2: the smaller batch comes between others; "
            "give at least --steps 3",
        ),
        (
            "--dataset-size 100 --batch 101",
            "--batch 101 and --dataset-size 100: no batch is ever full; give at most --batch 100",
        ),
    ],
)
def test_wrong_usage(options: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert outcome(f"estimate --model cnn {options}", capsys) == (2, "", f"planner: {line}\n")
