"""Checkpointing: which blocks, and what of them is alive when."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.capture.loop.checkpoint import checkpointed_blocks, find_blocks
from planner.errors import ModelError
from planner.jobs import Checkpoint, Job, Mode, Precision
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Trace, validate
from tests.helpers.models import job_of, story_of_tensors, trace_of


class Block(nn.Module):
    """Ten numbers in, ten out, forty between."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(10, 40, bias=False), nn.Linear(40, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


def two_blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(10, 3, bias=False))


def job(**fields: object) -> Job:
    return job_of("10", mode=Mode.TRAIN, **({"checkpoint": Checkpoint.BLOCKS} | fields))


def phase_of(trace: Trace, phase: str) -> list[str]:
    """The story of one phase, such as `backward 1`."""
    lines = story_of_tensors(trace)
    start = lines.index(phase) + 1
    return lines[start : next(i for i in range(start, len(lines)) if lines[i][0] not in "+-")]


def test_only_the_inputs_of_blocks_wait_for_the_backward_pass() -> None:
    """Two blocks at batch 16: 640 bytes pass from block to block, 2560 inside are gone or made again."""
    trace = trace_of(two_blocks, job(), 16)
    validate(trace)
    assert trace.notes == ("activations are checkpointed block by block: 2 Block",)
    inside = ["+2560 temporaries", "+2560 temporaries", "-2560", "+640 activations", "-2560"]
    assert phase_of(trace, "forward 1") == [*inside, *inside, "+192 activations", "+4 activations"]
    again = [
        "+2560 temporaries",  # the wide layer's output
        "+2560 temporaries",  # its tanh, the last tensor that the backward pass needs
        "-2560",
        "+1600 gradients",  # of the narrow layer
        "+2560 temporaries",  # gradient of tanh's output
        "-640",  # the gradient that came in
        "+2560 temporaries",  # gradient of tanh's input
        "-2560",
        "-2560",
        "+1600 gradients",  # of the wide layer
    ]
    assert phase_of(trace, "backward 1") == [
        "+4 temporaries",
        "+120 gradients",
        "+640 temporaries",
        "-640",  # the second block's output
        *again,
        "+640 temporaries",
        "-2560",
        "-640",  # the first block's output
        *again,
        "-2560",
        "-4",
    ]


def test_blocks_of_the_backward_pass_know_their_module_after_a_run_that_stopped_early() -> None:
    """The second run of a block ends inside one of its modules, which is not the place of what follows."""
    trace = trace_of(two_blocks, job(steps=2), 16)
    allocs: list[str] = []
    phase = ""
    for event in trace.events:
        if isinstance(event, PhaseStart):
            phase = f"{event.phase} {event.step}"
        elif (
            isinstance(event, Alloc)
            and event.category is not Category.WORKSPACE
            and phase.startswith(("b", "i"))
        ):
            site = trace.sites[event.site]
            allocs.append(f"{phase}: {site.module} {site.op.split('.')[1]}")
    second = allocs[allocs.index("inputs 2:  empty") :]
    assert second == [
        "inputs 2:  empty",
        "backward 2:  ones_like",
        "backward 2: 2 mm",
        "backward 2: 2 mm",
        "backward 2: 1.wide mm",
        "backward 2: 1.narrow tanh",  # runs in the block again, on behalf of this module's gradient
        "backward 2: 1.narrow mm",
        "backward 2: 1.narrow mm",
        "backward 2: 1 tanh_backward",
        "backward 2: 1.wide mm",
        "backward 2: 1.wide mm",
        "backward 2: 0.wide mm",
        "backward 2: 0.narrow tanh",
        "backward 2: 0.narrow mm",
        "backward 2: 0.narrow mm",
        "backward 2: 0 tanh_backward",
        "backward 2: 0.wide mm",
    ]


def made_in_backward(trace: Trace, op: str) -> list[int]:
    """Sizes in bytes of what this operator made in the backward pass."""
    phase = Phase.SETUP
    sizes = []
    for event in trace.events:
        if isinstance(event, PhaseStart):
            phase = event.phase
        elif isinstance(event, Alloc) and phase is Phase.BACKWARD and trace.sites[event.site].op == op:
            sizes.append(event.size_bytes)
    return sizes


def test_the_second_run_is_under_autocast_as_the_first() -> None:
    """Blocks that ran in bfloat16 run in it again, though the region is over by then."""
    trace = trace_of(two_blocks, job(precision=Precision.AMP_BF16), 16)
    assert made_in_backward(trace, "aten.tanh.default") == [1280, 1280]
    assert made_in_backward(trace_of(two_blocks, job(), 16), "aten.tanh.default") == [2560, 2560]


class Own(nn.Module):
    """Checkpoints its block itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(10, 10, bias=False), nn.Sequential(Block(), nn.Dropout())
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_models_that_checkpoint_themselves_are_traced_with_either_kind(use_reentrant: bool) -> None:
    """When the backward pass starts, the block's input and output, the loss and the batch are alive."""
    trace = trace_of(lambda: Own(use_reentrant), job(checkpoint=Checkpoint.NONE), 16)
    validate(trace)
    alive: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, PhaseStart) and event.phase is Phase.BACKWARD:
            break
        if isinstance(event, Free):
            alive.pop(event.block, None)
        elif isinstance(event, Alloc) and event.category is Category.ACTIVATION:
            alive[event.block] = event.size_bytes
    assert list(alive.values()) == [640, 640, 4]
    assert made_in_backward(trace, "aten.tanh.default") == [2560]
    # dropout runs again in both: its mask is needed
    assert made_in_backward(trace, "aten.native_dropout.default") == [160, 640]


class Switched(nn.Module):
    """Has a switch of its own, as timm's models do."""

    def __init__(self, has: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.has, self.is_on = has, False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        assert self.has, "gradient checkpointing not supported"
        self.is_on = enable

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def test_a_switch_of_the_model_is_preferred() -> None:
    """The model's own switch is turned on, and no block is wrapped."""
    model = Switched(True)
    with checkpointed_blocks(model, job()) as notes:
        assert model.is_on and "forward" not in vars(model.blocks[0])
    assert notes == ("activations are checkpointed as the model's own set_grad_checkpointing does it",)


def test_a_switch_that_refuses_is_none() -> None:
    """The blocks are wrapped, as long as the loop runs, if the model's own switch refuses."""
    model = Switched(False)
    with checkpointed_blocks(model, job()) as notes:
        assert all("forward" in vars(block) for block in model.blocks)
    assert not any("forward" in vars(block) for block in model.blocks)
    assert notes == ("activations are checkpointed block by block: 2 Block",)


def test_a_model_without_blocks_is_refused_in_one_line() -> None:
    """Plain layers in a list are no blocks."""
    with pytest.raises(ModelError) as caught:
        trace_of(lambda: nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), job(), 2)
    assert str(caught.value) == (
        "test: no blocks to checkpoint: no list of it holds several modules of one class; use --checkpoint "
        "none, or checkpoint inside the model"
    )


class Stem(nn.Sequential):
    """A list that occurs twice beside blocks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 10), nn.ReLU())


class Deep(nn.Module):
    """A block of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(), Block(), Block()])


class Stage(nn.Sequential):
    """A list of blocks with a name of its own."""


def names_of(model: nn.Module) -> list[str]:
    blocks = {id(block) for block in find_blocks(model)}
    return [name for name, module in model.named_modules() if id(module) in blocks]


def test_blocks_are_found_where_models_have_them() -> None:
    """Stages are looked into, also those of one block; of blocks inside blocks the outer ones count."""
    stages = nn.Sequential(Stem(), nn.Sequential(Block(), Block()), nn.Sequential(Block()), Stem())
    assert names_of(stages) == ["1.0", "1.1", "2.0"]
    assert names_of(nn.Sequential(Stem(), Block(), Block(), Stem())) == ["1", "2"]
    assert names_of(nn.Sequential(Stage(Block(), Block()), Stage(Block()))) == ["0.0", "0.1", "1.0"]
    assert names_of(nn.Sequential(Deep(), Deep())) == ["0", "1"]
    shared = Block()
    assert names_of(nn.Sequential(shared, shared, Block())) == ["0", "2"]


class Growing(nn.Module):
    """Hands its blocks one list that it appends to afterwards, as DenseNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(10), Layer(20), Layer(30)])

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class Layer(nn.Module):
    """From all features so far to ten more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 10, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.cat(features, 1)))


def test_the_second_run_sees_lists_as_the_first_did() -> None:
    """Each layer concatenates again what there was of the features then."""
    trace = trace_of(Growing, job(), 16)
    assert made_in_backward(trace, "aten.cat.default") == [30 * 64, 20 * 64, 640]
