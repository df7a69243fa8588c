"""Memory of a recipe, in bytes that a pencil gets from the parameters: copies, halves and shares."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.jobs import (
    Checkpoint,
    ClipGradients,
    Loss,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    ZeroGrad,
    parse_tensor_spec,
)
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Trace
from tests.helpers.models import job_of, trace_of

BATCH = 4


class Block(nn.Module):
    """Two layers with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.first = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.second = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Images(nn.Module):
    """A small network for images of 3 x 16 x 16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(4)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Words(nn.Module):
    """A small recurrent network for 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.recurrent = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(x))[0][:, -1])


class Sequences(nn.Module):
    """A small transformer for 12 vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)[:, 0])


INPUTS: dict[type[nn.Module], str] = {Images: "3x16x16", Words: "12:int64", Sequences: "12x16"}
MODELS = tuple(INPUTS)
on_all = pytest.mark.parametrize("model", MODELS)


@cache
def taken(model: type[nn.Module], **fields: object) -> Trace:
    """The trace of two steps of a small model in training."""
    usual = {"mode": Mode.TRAIN, "steps": 2, "loss": Loss.CROSS_ENTROPY}
    job = job_of(INPUTS[model], target=parse_tensor_spec("scalar:int64"), **(usual | fields))
    return trace_of(model, job, BATCH)


def held(trace: Trace, until: Callable[[Event], bool] = lambda event: False) -> Counter[Category]:
    """Bytes by category that are alive before the first event of a kind, or at the end."""
    alive: dict[int, Alloc] = {}
    for event in trace.events:
        if until(event):
            break
        if isinstance(event, Alloc):
            alive[event.block] = event
        elif isinstance(event, Free):
            del alive[event.block]
    sizes: Counter[Category] = Counter()
    for block in alive.values():
        sizes[block.category] += block.size_bytes
    return sizes


def peak(trace: Trace, step: int | None = None) -> int:
    """The most bytes alive at once, in one step or in all; scratch memory is left out."""
    alive: dict[int, int] = {}
    now = most = 0
    counts = step is None
    for event in trace.events:
        if isinstance(event, PhaseStart):
            counts = step in (None, event.step)
        elif isinstance(event, Free):
            now -= alive.pop(event.block)
        else:
            alive[event.block] = 0 if event.category is Category.WORKSPACE else event.size_bytes
            now += alive[event.block]
            most = max(most, now) if counts else most
    return most


def is_backward(event: Event) -> bool:
    return isinstance(event, PhaseStart) and event.phase is Phase.BACKWARD


def parameters(model: type[nn.Module]) -> list[Tensor]:
    with torch.device("meta"):
        return list(model().parameters())


def weights_bytes(model: type[nn.Module]) -> int:
    return sum(weight.nbytes for weight in parameters(model))


@on_all
@pytest.mark.parametrize("impl", OptimizerImpl)
@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (Optimizer.SGD, 0),
        (Optimizer.MOMENTUM, 1),
        (Optimizer.NESTEROV, 1),
        (Optimizer.ADAM, 2),
        (Optimizer.ADAMW, 2),
        (Optimizer.ADAGRAD, 1),
        (Optimizer.RMSPROP, 1),
    ],
)
def test_state_is_so_many_copies_of_the_weights(
    model: type[nn.Module], optimizer: Optimizer, impl: OptimizerImpl, copies: int
) -> None:
    """Counters of steps are on the GPU where they are fused, 4 bytes for each weight, and nothing else is."""
    if optimizer is Optimizer.RMSPROP and impl is OptimizerImpl.FUSED:
        pytest.skip("torch has no fused RMSprop")
    counted = (Optimizer.ADAM, Optimizer.ADAMW, Optimizer.ADAGRAD)
    counters = 4 * len(parameters(model)) if impl is OptimizerImpl.FUSED and optimizer in counted else 0
    end = held(taken(model, optimizer=optimizer, optimizer_impl=impl))
    assert end[Category.OPTIMIZER] == copies * weights_bytes(model) + counters
    assert end[Category.GRADIENT] == weights_bytes(model)


@on_all
def test_adafactor_keeps_rows_and_columns(model: type[nn.Module]) -> None:
    """A weight with two dimensions or more has a mean for each row and each column, others have a copy."""
    factored = sum(
        4 * (weight.numel() // weight.shape[-1] + weight.numel() // weight.shape[-2])
        if weight.dim() > 1
        else weight.nbytes
        for weight in parameters(model)
    )
    assert held(taken(model, optimizer=Optimizer.ADAFACTOR))[Category.OPTIMIZER] == factored


@on_all
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_half_precision_halves(model: type[nn.Module], precision: Precision) -> None:
    """Weights, gradients and moments take two bytes a number."""
    options = {"optimizer": Optimizer.ADAMW}
    half = held(taken(model, **options, precision=precision))
    assert half[Category.GRADIENT] == weights_bytes(model) // 2
    assert half[Category.OPTIMIZER] == weights_bytes(model)


@on_all
@pytest.mark.parametrize("precision", [Precision.AMP_BF16, Precision.AMP_FP16])
def test_autocast_keeps_weights_as_they_are(model: type[nn.Module], precision: Precision) -> None:
    """Weights, gradients and moments stay in fp32; what waits for the backward pass gets smaller."""
    options = {"optimizer": Optimizer.ADAMW, "grad_scaler": precision is Precision.AMP_FP16}
    plain, mixed = taken(model), taken(model, **options, precision=precision)
    end = held(mixed)
    assert end[Category.PARAMETER] == held(plain)[Category.PARAMETER]
    assert end[Category.GRADIENT] == weights_bytes(model)
    assert end[Category.OPTIMIZER] == 2 * weights_bytes(model)


@on_all
def test_ddp_holds_the_gradients_twice(model: type[nn.Module]) -> None:
    """Buckets beside the gradients; as views there is one copy."""
    one = weights_bytes(model)
    assert held(taken(model, ddp=True))[Category.GRADIENT] == 2 * one
    assert held(taken(model, ddp=True, ddp_bucket_view=True))[Category.GRADIENT] == one


@on_all
def test_an_average_is_one_more_copy(model: type[nn.Module]) -> None:
    """A moving average holds all weights and buffers; it counts its updates on the CPU."""
    plain, averaged = held(taken(model)), held(taken(model, ema=True))
    with torch.device("meta"):
        buffers = sum(buffer.nbytes for buffer in model().buffers())
    assert averaged[Category.OPTIMIZER] == weights_bytes(model) + buffers
    assert averaged - Counter({Category.OPTIMIZER: averaged[Category.OPTIMIZER]}) == plain


@on_all
def test_frozen_weights_have_neither_gradients_nor_moments(model: type[nn.Module]) -> None:
    """With the head alone in training, gradients are those of the head, and moments twice as much."""
    with torch.device("meta"):
        head = sum(weight.nbytes for name, weight in model().named_parameters() if name.startswith("head"))
    end = held(taken(model, optimizer=Optimizer.ADAMW, train_only=("head*",)))
    assert end[Category.GRADIENT] == head
    assert end[Category.OPTIMIZER] == 2 * head
    assert peak(taken(model, train_only=("head*",))) < peak(taken(model))


@pytest.mark.parametrize("model", [Images, Sequences])
def test_checkpoints_leave_less_to_wait(model: type[nn.Module]) -> None:
    """Blocks that run again keep their inputs alone; weights, gradients and the rest are the same."""
    plain, again = taken(model), taken(model, checkpoint=Checkpoint.BLOCKS)
    assert 2 * held(again, is_backward)[Category.ACTIVATION] < held(plain, is_backward)[Category.ACTIVATION]
    assert held(again)[Category.GRADIENT] == held(plain)[Category.GRADIENT]
    assert peak(again) < peak(plain)


@on_all
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3},
        {"clip_gradients": ClipGradients.NORM},
        {"clip_gradients": ClipGradients.VALUE},
        {"memory_format": MemoryFormat.CHANNELS_LAST},
    ],
)
def test_recipes_that_leave_nothing_behind(model: type[nn.Module], options: dict[str, object]) -> None:
    """Micro-batches, clipping and another layout add nothing that outlives the step."""
    end = held(taken(model, **options))
    assert end[Category.PARAMETER] == held(taken(model))[Category.PARAMETER]
    assert end[Category.GRADIENT] == weights_bytes(model)
    assert end[Category.OPTIMIZER] == 0


@on_all
def test_gradients_go_where_the_option_says(model: type[nn.Module]) -> None:
    """Set to None after the step, none is left; kept, they are there in the next forward pass."""
    gone = taken(model, zero_grad=ZeroGrad.AFTER_STEP)
    assert held(gone)[Category.GRADIENT] == 0
    retained = taken(model, zero_grad=ZeroGrad.AFTER_STEP, keep_grads=True)
    assert held(retained)[Category.GRADIENT] == weights_bytes(model)
    assert peak(gone) <= peak(retained)


@on_all
def test_inference_holds_the_weights_alone(model: type[nn.Module]) -> None:
    """Neither gradients nor state nor activations, and less than in training at its highest."""
    infer = taken(model, mode=Mode.INFER)
    roles = {event.category for event in infer.events if isinstance(event, Alloc)}
    assert roles <= {Category.PARAMETER, Category.INPUT, Category.TEMPORARY, Category.WORKSPACE}
    assert peak(infer) < peak(taken(model))


@on_all
def test_the_first_step_has_no_state_yet(model: type[nn.Module]) -> None:
    """With moments the second step is higher, and without them the same."""
    adam = taken(model, optimizer=Optimizer.ADAMW, optimizer_impl=OptimizerImpl.FUSED)
    assert peak(adam, 1) > peak(adam, 0)
    assert peak(taken(model), 1) >= peak(taken(model), 0)
