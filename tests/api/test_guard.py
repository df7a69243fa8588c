"""`planner.guard` without a GPU, and what it reads of a training's objects; tests/emulator has the rest."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import planner
from calibration.probe.client import DetectedGpu
from calibration.probe.training_meter import TrainingMeter
from calibration.trainings import keep_training
from planner.api.guard.plan import GuardRequest, plan_training
from planner.capture.models.live.training import digest_of, read_training
from planner.errors import DoesNotFitError, UsageError
from planner.hardware.calibration.files import load_folders
from planner.hardware.calibration.model import Fit, Observation, Settings, Versions
from planner.hardware.device import MIB
from planner.jobs import MemoryFormat, Precision


class Net(nn.Module):
    """Two layers; the first is 12 MiB."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3072, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.flatten(1)).relu())


def sample(batch: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(batch, 3, 32, 32, device="meta"), torch.empty(batch, dtype=torch.int64, device="meta")


def card(mib: int = 12_288) -> DetectedGpu:
    """An RTX 3060, or one of another memory that is not in the database."""
    usable = mib * MIB - 251 * MIB
    versions = Versions("2.13.0+cu130", "13.0", "9.20.0", None, (8, 6), usable, mib * MIB)
    return DetectedGpu("NVIDIA GeForce RTX 3060", versions, Settings())


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let models count as those of a GPU that only this process uses."""
    monkeypatch.setattr("calibration.probe.training_meter.others_bytes", lambda *_: 0)
    monkeypatch.setattr("calibration.probe.training_meter.cap_of_process", lambda *_: None)
    monkeypatch.setattr("planner.capture.models.live.training.cuda_index_of", lambda _: 0)
    monkeypatch.setattr("planner.capture.cuda_index_of", lambda _: 0, raising=False)
    return monkeypatch


def request(model: nn.Module, batch: Any, **options: Any) -> GuardRequest:
    optimizer = torch.optim.Adam(model.parameters())
    return GuardRequest(model, optimizer, batch, None, None, None, options, None)


def test_training_on_the_cpu_is_left_alone() -> None:
    """One warning at the line of the script, no plan, no report, and the body runs."""
    model = Net(8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with planner.guard(model, torch.optim.SGD(model.parameters()), sample()) as guard:
            ran = True
    assert ran and guard.plan is None and guard.result is None
    assert [(str(one.message), one.filename) for one in seen] == [
        ("planner.guard: the model is not on an NVIDIA GPU: nothing is planned or measured", __file__)
    ]


def test_misspelt_options_are_refused() -> None:
    """They are mistakes of the script, found before the first step."""
    model = Net(8)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="planner.guard has no option 'gpu'; it plans for the GPU of the"):
        planner.guard(model, optimizer, sample(), gpu="L4")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="on_misfit: unknown value 'stop'; use raise or warn"):
        planner.guard(model, optimizer, sample(), on_misfit="stop")  # type: ignore[arg-type]


def test_a_plan_names_what_it_assumes(on_gpu: pytest.MonkeyPatch) -> None:
    """Optimizer and sample are the job's; the guessed loss is named; hooks of others see nothing."""
    calls: list[int] = []
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    plan = plan_training(request(Net(), sample()), TrainingMeter(0, card(), None))
    handle.remove()
    assert (plan.batch, plan.job.loop.optimizer, plan.is_uncertain) == (
        32, "adam", False
    )  # fmt: skip
    assert plan.estimate.budget.device.name == "RTX 3060 12GB"
    assert any("the loss is taken to be" in note for note in plan.estimate.notes)
    assert calls == []


def test_what_cannot_fit_raises(on_gpu: pytest.MonkeyPatch) -> None:
    """The error is one line with batch, GPU, sizes and the largest batch."""
    on_gpu.setattr("calibration.probe.training_meter.open_meter", lambda _: TrainingMeter(0, card(), None))
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(DoesNotFitError) as caught:
        planner.guard(model, optimizer, sample(2_000_000))
    text = str(caught.value)
    assert text.startswith("Net at batch 2,000,000 on RTX 3060 12GB most likely does not fit: it takes ")
    assert "; the largest batch that fits is " in text and text.endswith("; on_misfit='warn' tries it")
    with pytest.warns(UserWarning, match="most likely does not fit"):
        planner.guard(model, optimizer, sample(2_000_000), on_misfit="warn")


def test_what_cannot_be_planned_is_warned_of(on_gpu: pytest.MonkeyPatch) -> None:
    """A model that is split already, or a loss that is not known, ends no training."""
    on_gpu.setattr("calibration.probe.training_meter.open_meter", lambda _: TrainingMeter(0, card(), None))
    model = Net(8)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(UserWarning, match="no plan, the training goes on: .*the loss is not known"):
        assert planner.guard(model, optimizer, (sample()[0],)).plan is None
    with pytest.warns(UserWarning, match="no plan, the training goes on: DataParallel gathers"):
        assert planner.guard(nn.DataParallel(model), optimizer, sample()).plan is None


def test_objects_tell_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Precision by weights and by autocast around, the memory format, DistributedDataParallel's buckets."""
    half = read_training(Net(8).bfloat16(), sample(), None, None)
    last = read_training(nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), sample(), "mse", None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float16)
    region = read_training(Net(8), sample(), None, None)
    monkeypatch.undo()
    wrapped = type("DistributedDataParallel", (nn.Module,), {"gradient_as_bucket_view": True})()
    wrapped.module = Net(8)
    assert half.fields == {"precision": Precision.BF16}
    assert last.fields == {"memory_format": MemoryFormat.CHANNELS_LAST}
    assert region.fields == {"precision": Precision.AMP_FP16}
    assert read_training(wrapped, sample(), None, None).fields == {"ddp": True, "ddp_bucket_view": True}


def test_two_models_of_one_name_are_told_apart() -> None:
    """Widths, frozen weights, options and the loss are in the digest; the learning rate is not."""

    def digest(model: nn.Module, loss: str | None = None, **options: Any) -> str:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        return digest_of(read_training(model, sample(), loss, None), optimizer, loss)

    frozen = Net()
    frozen.body.requires_grad_(False)
    digests = [
        digest(Net()),
        digest(Net(8)),
        digest(frozen),
        digest(Net(), amsgrad=True),
        digest(Net(), "mse"),
    ]
    assert len(set(digests)) == 5
    assert digest(Net()) == digest(Net(), lr=0.5)


def test_four_trainings_make_a_calibration(on_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Observations of four batch sizes give a line; the same run is not added twice."""
    gpu = card()
    told = []
    for batch in (1024, 4096, 8192, 16_384, 16_384):
        plan = plan_training(request(Net(), sample(batch)), TrainingMeter(0, gpu, None))
        run = plan.estimate.run
        seen = Observation(
            *(plan.job, batch, gpu.name, gpu.versions, gpu.settings),
            oom=False,
            source="measured",
            about="",
            when="2026-01-02",
            peak_allocated_bytes=run.peak_allocated_bytes,
            peak_reserved_bytes=run.peak_reserved_bytes,
            process_peak_bytes=run.peak_reserved_bytes + 300 * MIB,
            retries=0,
        )
        told.append(keep_training(seen, plan.trace, plan.estimate.budget.limits.config, tmp_path)[1])
    (stored,) = load_folders([tmp_path])
    assert isinstance(stored.fit, Fit) and stored.fit.slope == pytest.approx(1, abs=0.02)
    assert told[3:] == ["the calibration has a line through 4 runs", "the same peaks stood there"]


def test_readings_end_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that stops answering within a step leaves the loop alone and costs its own figure."""
    for name in ("reset_peak_memory_stats", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: {})
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 64)

    def silent() -> int:
        raise RuntimeError("NVML has gone")

    model = Net(8)
    optimizer = torch.optim.SGD(model.parameters())
    gauge: Any = SimpleNamespace(level=silent)
    meter = TrainingMeter(0, card(), gauge)
    meter.start(optimizer, model)
    optimizer.step()
    seen = meter.stop()
    assert (seen.steps, seen.peak_allocated_bytes, seen.process_peak_bytes) == (1, 64, None)


def test_a_meter_reads_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are the largest seen, even where a loop resets torch's; the context is that after step 3."""
    peaks = iter([10, 50, 20, 20, 20])
    for name, answer in {
        "memory_stats": lambda _: {"num_alloc_retries": 2},
        "reset_peak_memory_stats": lambda _: None,
        "max_memory_allocated": lambda _: next(peaks),
        "max_memory_reserved": lambda _: 64,
        "memory_allocated": lambda _: 7,
        "memory_reserved": lambda _: 60,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    model = Net(8)
    optimizer = torch.optim.SGD(model.parameters())
    gauge: Any = SimpleNamespace(level=lambda: 100)
    meter = TrainingMeter(0, card(), gauge)
    meter.start(optimizer, model)
    for _ in range(4):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
    seen = meter.stop()
    assert (seen.steps, seen.peak_allocated_bytes, seen.peak_reserved_bytes) == (4, 50, 64)
    assert (seen.process_peak_bytes, seen.context_after_bytes, seen.end_allocated_bytes) == (100, 40, 7)
    assert seen.shapes == {((2, 3, 32, 32),)} and seen.was_fresh
    assert not optimizer._optimizer_step_post_hooks and not model._forward_pre_hooks
