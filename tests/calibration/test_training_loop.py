"""The loop that a probe runs on real tensors is the loop that is traced."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from calibration.probe.run import build_real_model, host_batch, run_real
from planner.capture.loop.batches import empty_batch
from planner.capture.loop.optimizers import build_optimizer
from planner.capture.loop.runtime import LoopRuntime
from planner.capture.loop.training_loop import run_loop
from planner.jobs import Job, Mode, Optimizer, ZeroGrad, parse_tensor_spec
from planner.program.events import Alloc, Phase, PhaseStart
from tests.helpers.models import AMPERE, trace_of
from tests.helpers.probes import training


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


class CallLog(TorchDispatchMode):  # type: ignore[misc]
    """Writes down the loop's phases and, in all but the copy of the batch, the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self.phase = Phase.SETUP

    def on_phase(self, step: int, phase: Phase) -> None:
        self.phase = phase
        self.calls.append(f"{step} {phase}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.phase not in (Phase.SETUP, Phase.INPUTS):
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def calls_on_cpu(job: Job) -> list[str]:
    log = CallLog()
    with log:
        run_real(job, 4, "cpu", log.on_phase, lambda _: tiny())
    return log.calls[1:]  # what follows the set-up


def calls_on_meta(job: Job) -> list[str]:
    with torch.device("meta"):
        model = tiny()
    log = CallLog()
    optimizer = None
    if job.loop.mode is Mode.TRAIN:
        optimizer = build_optimizer(job.loop.optimizer, job.loop.optimizer_impl, model.parameters())
    with log:
        run_loop(model, job, lambda: empty_batch(job, 4, "meta"), optimizer, log.on_phase, LoopRuntime())
    return log.calls


@pytest.mark.parametrize(
    "job",
    [
        training(),
        training(optimizer=Optimizer.MOMENTUM, zero_grad=ZeroGrad.AFTER_STEP, steps=4),
        training(zero_grad=ZeroGrad.BEFORE_BACKWARD, keep_grads=True),
        training(mode=Mode.INFER, target=None),
        training(mode=Mode.FORWARD, target=None, steps=1),
    ],
    ids=lambda job: f"{job.loop.mode}-{job.loop.optimizer}-{job.loop.zero_grad}",
)
def test_real_tensors_run_the_very_loop_that_is_traced(job: Job) -> None:
    """Phases and operators come in the same order with real tensors on a device and with none on meta."""
    on_cpu = calls_on_cpu(job)
    assert on_cpu == calls_on_meta(job)
    assert sum(line.endswith("forward") and line[0].isdecimal() for line in on_cpu) == job.loop.steps


def test_real_tensors_pass_the_marks_of_the_recorded_trace() -> None:
    """The recorder's marks are the phases of the run with real tensors, and its sizes those of that run."""
    job = training()
    marks: list[PhaseStart] = []
    run_real(job, 4, "cpu", lambda step, phase: marks.append(PhaseStart(step, phase)), lambda _: tiny())
    trace = trace_of(tiny, job, 4, AMPERE)
    assert [event for event in trace.events if isinstance(event, PhaseStart)] == marks
    born = [event.size_bytes for event in trace.events if isinstance(event, Alloc)]
    placed = [tensor.nbytes for child in tiny() for tensor in child.parameters()]
    copied = [
        tensor.nbytes for tensor in (*host_batch(job, 4)[0], host_batch(job, 4)[2]) if tensor is not None
    ]
    assert born[: len(placed) + len(copied)] == placed + copied


def test_a_batch_on_the_host_has_the_shapes_of_the_traced_one_and_valid_values() -> None:
    """Whole numbers are 0 save in masks, which let all but one token through; targets are probabilities."""
    job = training(
        inputs=tuple(map(parse_tensor_spec, ("3x8x8", "input_ids=6:int64", "attention_mask=6:int64"))),
        target=parse_tensor_spec("5"),
    )
    args, kwargs, target = host_batch(job, 4)
    like_args, like_kwargs, like_target = empty_batch(job, 4, "meta")
    assert [(x.shape, x.dtype) for x in (*args, *kwargs.values())] == [
        (x.shape, x.dtype) for x in (*like_args, *like_kwargs.values())
    ]
    assert target is not None and like_target is not None and target.shape == like_target.shape
    assert kwargs["input_ids"].unique().tolist() == [0]
    assert kwargs["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], *[[1] * 6] * 3]
    assert 0 <= float(target.min()) <= float(target.max()) <= 1
    assert host_batch(job.replace(mode=Mode.INFER), 4)[2] is None


def test_a_real_model_has_the_values_of_its_constructor() -> None:
    """Nothing of the model is on meta, and its tables of indices are filled."""
    model = build_real_model(Job.create("torchvision:swin_t", inputs=(parse_tensor_spec("3x224x224"),)))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    tables = [buffer for name, buffer in model.named_buffers() if "index" in name]
    assert tables and all(int(table.max()) == 168 for table in tables)
