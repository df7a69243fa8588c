"""The loop: what its options do, in which order, and what is alive when."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from planner.capture.loop.runtime import LoopRuntime
from planner.capture.loop.training_loop import run_loop
from planner.jobs import ClipGradients, Job, Loss, Mode, ZeroGrad
from planner.program.events import Alloc, Category, Phase, PhaseStart, validate
from planner.report.assumptions import run_assumptions
from tests.calibration.test_training_loop import calls_on_cpu, calls_on_meta
from tests.helpers.models import job_of, story_of_tensors, trace_of
from tests.helpers.probes import training
from tests.report.test_text import budget, estimated


def linear() -> nn.Module:
    return nn.Linear(5, 7, bias=False)


def job(**fields: object) -> Job:
    return job_of("5", **({"mode": Mode.TRAIN} | fields))


def test_gradients_of_micro_batches_are_added_up() -> None:
    """The first micro-batch makes the gradient, the second makes one that is added and goes."""
    trace = trace_of(linear, job(accumulate=2), 2)
    validate(trace)
    assert story_of_tensors(trace) == [
        "setup 0",
        "+140 parameters",
        "inputs 1",
        "+40 inputs",
        "forward 1",
        "+56 activations",
        "+4 temporaries",  # the loss
        "+4 activations",  # half of it
        "-4",
        "backward 1",
        "+4 temporaries",
        "+4 temporaries",  # gradient of the whole loss, which the product reads expanded
        "+140 gradients",
        "-4",
        "-4",
        "inputs 1",
        "-40",
        "+40 inputs",
        "forward 1",
        "+56 activations",
        "-56",
        "+4 temporaries",
        "-4",
        "+4 activations",
        "-4",
        "backward 1",
        "+4 temporaries",
        "+4 temporaries",
        "+140 temporaries",
        "-4",
        "-140",
        "-4",
        "optimizer 1",
        "end 1",
    ]


def test_a_dropped_output_is_freed_before_the_backward_pass() -> None:
    """Otherwise the variable of the loop keeps it until the next output."""
    kept, dropped = (story_of_tensors(trace_of(linear, job(drop_output=drops), 2)) for drops in (False, True))
    assert "-56" not in kept
    assert "-56" in dropped[: dropped.index("backward 1")]


class Autoencoder(nn.Module):
    """The training_step of a LightningModule, called directly, with a loss of squares."""

    def __init__(self, *, returns_dict: bool) -> None:
        super().__init__()
        self.layer, self.returns_dict = linear(), returns_dict

    def forward(self, x: Tensor) -> Any:
        output = self.layer(x)
        loss = nn.functional.mse_loss(output, torch.zeros_like(output))
        return {"loss": loss, "seen": output.detach()} if self.returns_dict else loss


@pytest.mark.parametrize("returns_dict", [False, True])
def test_lightning_releases_the_undivided_loss_before_the_backward_pass(returns_dict: bool) -> None:
    """Its storage of 56 bytes holds a loss for each element; what else a step returns is kept."""
    own = job(loss=Loss.TRAINING_STEP)
    story = story_of_tensors(trace_of(lambda: Autoencoder(returns_dict=returns_dict), own, 2))
    start, end = story.index("backward 1"), story.index("optimizer 1")
    assert story[start - 2 : start] == ["+4 activations", "-56"]
    assert story[start:end].count("-56") == (2 if returns_dict else 3)


@pytest.mark.parametrize("when", ZeroGrad)
def test_gradients_are_let_go_of_once_in_a_step(when: ZeroGrad) -> None:
    """Wherever `zero_grad` stands, two steps of three micro-batches make two gradients that stay."""
    trace = trace_of(linear, job(accumulate=3, steps=2, zero_grad=when), 2)
    gradients = [
        e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.GRADIENT
    ]
    assert gradients == [140, 140]


def test_an_average_is_made_before_the_first_step_and_kept() -> None:
    """A copy of parameters and buffers, which counts as state of the optimizer."""
    trace = trace_of(lambda: nn.BatchNorm1d(5), job(ema=True, steps=2), 2)
    validate(trace)
    lines = story_of_tensors(trace)
    assert lines[: lines.index("inputs 1")] == [
        "setup 0",
        *["+20 parameters"] * 4,
        "+8 parameters",
        *["+20 optimizer"] * 4,
        "+8 optimizer",
    ]
    assert "optimizer" not in " ".join(line for line in lines[lines.index("inputs 1") :] if line[0] == "+")


def test_evaluation_runs_before_the_last_step_beside_the_names_of_the_one_before() -> None:
    """Two batches without gradients; the training's batch, output and loss stay, later the evaluation's."""
    trace = trace_of(lambda: nn.Sequential(linear(), nn.Sigmoid()), job(evaluate=True, steps=2), 2)
    validate(trace)
    lines = story_of_tensors(trace)
    second = lines.index("inputs 2")
    assert lines[second:] == [
        "inputs 2",
        "+40 inputs",
        "evaluation 2",
        "+56 temporaries",  # of the linear layer, which only sigmoid needs
        "+56 temporaries",  # the output
        "-56",
        "+4 temporaries",  # the loss
        "inputs 2",
        "-40",
        "+40 inputs",
        "evaluation 2",
        "+56 temporaries",
        "+56 activations",  # counted so because it is still there when the backward pass starts
        "-56",
        "-56",
        "+4 activations",
        "-4",
        "inputs 2",
        "-40",  # only now the training's batch
        "+40 inputs",
        "forward 2",
        "-140",  # the gradient
        "+56 temporaries",
        "+56 activations",
        "-56",
        "-56",  # the training's output
        "+4 activations",
        "-4",
        "backward 2",
        "+4 temporaries",
        "+56 temporaries",
        "+140 gradients",
        "-56",
        "-4",
        "optimizer 2",
        "end 2",
    ]


class Modes(nn.Module):
    """Notes whether it trains and whether gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, torch.is_grad_enabled()))
        return self.linear(x)  # type: ignore[no-any-return]


def test_evaluation_is_in_eval_mode_and_training_goes_on_after_it() -> None:
    """Mode and gradients of each of the passes."""
    model = Modes()
    run(model, job(evaluate=True, steps=3), LoopRuntime())
    train, evaluate = (True, True), (False, False)
    assert model.seen == [train, train, evaluate, evaluate, train]


class Log:
    """Records all calls of the loop, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_phase(self, step: int, phase: Phase) -> None:
        self.lines.append(f"{phase} {step}")

    @contextmanager
    def autocast(self) -> Iterator[None]:
        self.lines.append("region")
        yield
        self.lines.append("end of region")

    def scale(self, outputs: Tensor) -> Tensor:
        self.lines.append("scale")
        return outputs * 1024

    def unscale_(self, optimizer: optim.Optimizer) -> None:
        self.lines.append("unscale")

    def step(self, optimizer: optim.Optimizer) -> object:
        self.lines.append("step")
        return optimizer.step()

    def update(self) -> None:
        self.lines.append("update")


def run(model: nn.Module, job: Job, machine: LoopRuntime, log: Log | None = None) -> None:
    """Run the loop on the CPU."""

    def fetch() -> Any:
        return (torch.ones(2, 5),), {}, None

    optimizer = optim.SGD(model.parameters(), lr=0.0)
    run_loop(model, job, fetch, optimizer, (log or Log()).on_phase, machine)


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({}, ["region", "end of region", "backward 1", "scale", "optimizer 1", "step", "update"]),
        (
            {"backward_in_autocast": True, "clip_gradients": ClipGradients.VALUE},
            ["region", "backward 1", "scale", "end of region", "optimizer 1", "unscale", "step", "update"],
        ),
        (
            {"accumulate": 2},
            [
                *("region", "end of region", "backward 1", "scale", "inputs 1", "forward 1"),
                *("region", "end of region", "backward 1", "scale", "optimizer 1", "step", "update"),
            ],
        ),
    ],
)
def test_regions_and_scaling_stand_where_scripts_have_them(
    fields: dict[str, object], order: list[str]
) -> None:
    """The region ends before or after the backward pass; gradients are unscaled only to be clipped."""
    log = Log()
    run(linear(), job(**fields), LoopRuntime(log.autocast, log), log)
    assert log.lines == ["inputs 1", "forward 1", *order, "end 1"]


@pytest.mark.parametrize(("how", "largest"), [("none", 2.0), ("value", 1.0), ("norm", 35**-0.5)])
def test_gradients_are_clipped_before_the_optimizer_uses_them(how: str, largest: float) -> None:
    """Each of the 35 gradients is 2 before; by norm they are clipped to 1 together, by value each."""
    model = linear()
    seen: list[float] = []

    class Watching(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)

    def fetch() -> Any:
        return (torch.ones(2, 5),), {}, None

    clipping = job(clip_gradients=ClipGradients(how))
    run_loop(model, clipping, fetch, Watching(model.parameters(), lr=0.0), Log().on_phase, LoopRuntime())
    assert seen == [pytest.approx(largest, abs=1e-6)]


@pytest.mark.parametrize(
    "fields",
    [
        {"accumulate": 3},
        {"evaluate": True, "zero_grad": ZeroGrad.AFTER_STEP},
        {"ddp": True},
        {"ddp": True, "ddp_bucket_view": True, "keep_grads": True},
    ],
    ids=str,
)
def test_real_tensors_run_the_very_loop_that_is_traced(fields: dict[str, object]) -> None:
    """With each option phases and operators come in the same order on a device and on meta."""
    on_cpu, on_meta = calls_on_cpu(training(**fields)), calls_on_meta(training(**fields))
    # Before the first batch, where the model is wrapped, only one of the two writes down operators.
    assert on_cpu[on_cpu.index("1 inputs") :] == on_meta[on_meta.index("1 inputs") :]


def test_marks_of_micro_batches_and_of_an_evaluation() -> None:
    """Phases repeat within their step, and steps count up."""
    trace = trace_of(linear, job(accumulate=2, evaluate=True, steps=2), 2)
    marks = [f"{event.phase} {event.step}" for event in trace.events if isinstance(event, PhaseStart)]
    batch = ["inputs", "forward", "backward"]
    passes = [*batch, *batch, "optimizer"]
    evaluation = ["inputs", "evaluation"] * 2
    assert marks == [
        "setup 0",
        *(f"{phase} 1" for phase in passes),
        *(f"{phase} 2" for phase in (*evaluation, *passes)),
        "end 2",
    ]


def test_the_answer_says_what_the_options_stand_for() -> None:
    """One sentence for each option of the loop; none for those that are not used, or do not train."""

    def sentences(**fields: object) -> list[str]:
        plain = run_assumptions(estimated(2, budget(450), job()))
        notes = run_assumptions(estimated(2, budget(450), job(**fields)))
        return [line for line in notes[1:] if line not in plain]  # the first is about margins

    assert sentences() == []
    assert sentences(mode=Mode.INFER, ddp=True, ema=True)[1:] == []
    assert sentences(accumulate=4) == ["each step adds up the gradients of 4 batches of this size"]
    assert sentences(clip_gradients=ClipGradients.NORM) == [
        "gradients are clipped by their norm before each step of the optimizer"
    ]
    assert sentences(ema=True) == ["a moving average of parameters and buffers is kept on the GPU"]
    assert sentences(evaluate=True) == [
        "before the last step, two batches of this size are evaluated without gradients; output and loss of "
        "the training live meanwhile, those of the evaluation afterwards"
    ]
    assert sentences(ddp=True, ddp_bucket_view=True) == [
        "DistributedDataParallel with its defaults: all gradients in one bucket in the first step, then the "
        "first of 1 MiB and others of 25; gradients are views of the buckets",
    ]
    assert sentences(mode=Mode.GENERATE, new_tokens=64) == [
        "once, the prompt is read and 64 tokens are added to it greedily, no sequence ends before; the "
        "key-value cache grows by concatenation and goes with the call"
    ]
