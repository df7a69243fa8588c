"""The recorder over a running loop, each truth on the smallest model that shows it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.jobs import Mode, Optimizer, OptimizerImpl, ZeroGrad
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, validate
from tests.helpers.models import born, job_of, story, trace_of


class Apply(nn.Module):
    """A module without parameters that runs a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def test_a_linear_layer_in_full() -> None:
    """One training step of Linear(3, 5) at batch 2, every block in order."""
    trace = trace_of(lambda: nn.Linear(3, 5), job_of("3", mode=Mode.TRAIN, steps=1), 2)
    assert story(trace) == [
        "setup 0",
        "+60 parameters",  # weight
        "+20 parameters",  # bias
        "inputs 1",
        "+24 inputs",
        "forward 1",
        "+40 activations",  # output
        "+8519680 workspaces",  # cuBLAS in the forward thread
        "+4 activations",  # loss
        "backward 1",
        "+4 temporaries",  # its gradient of one; `sum` hands it on expanded, without a copy
        "+60 gradients",  # weight, by a product
        "+40 workspaces",  # a copy of that expanded gradient, which cuBLAS cannot read
        "+8519680 workspaces",  # cuBLAS in the backward thread
        "-40",
        "+20 gradients",  # bias
        "-4",
        "optimizer 1",  # foreach SGD updates in place
        "end 1",
    ]


def test_the_old_batch_is_gone_before_the_new_one_is_made() -> None:
    """From the second step on, the input's block dies before the next one is born."""
    trace = trace_of(nn.Identity, job_of("100", steps=2, mode=Mode.INFER), 3)
    assert story(trace)[-5:] == ["inputs 2", "+1200 inputs", "forward 2", "-1200", "end 2"]
    # The output of an identity is the old batch, so there it lived on; with a computed output it dies at
    # once.
    trace = trace_of(lambda: Apply(torch.relu), job_of("100", steps=2, mode=Mode.INFER), 3)
    assert story(trace)[-7:] == [
        "inputs 2",
        "-1200",
        "+1200 inputs",
        "forward 2",
        "+1200 temporaries",
        "-1200",
        "end 2",
    ]


def test_views_are_no_blocks_and_in_place_operators_make_none() -> None:
    """Views share their storage and in-place operators keep theirs."""
    trace = trace_of(
        lambda: Apply(lambda x: x.view(-1).unsqueeze(0).t().mul_(2).relu_()), job_of("10", mode=Mode.INFER), 2
    )
    assert born(trace) == [80]


def test_a_storage_that_is_resized_is_a_new_block() -> None:
    """Growing a storage allocates the new block first and frees the old one then."""

    def grow(x: Tensor) -> Tensor:
        y = torch.empty(4, device=x.device)
        return y.resize_(16)

    trace = trace_of(lambda: Apply(grow), job_of("1", mode=Mode.INFER), 1)
    assert story(trace)[-5:-1] == ["forward 1", "+16 temporaries", "+64 temporaries", "-16"]


class Branches(nn.Module):
    """A tensor that two branches use, so that autograd adds two gradients."""

    def __init__(self, branches: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7))
        self.branches = branches or (lambda y: torch.tanh(y) + torch.sigmoid(y))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return self.branches(y)


class Address(torch.autograd.Function):
    """Passes values through and notes where the gradient lies that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[int]) -> Tensor:
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.notes.append(gradients[0].data_ptr())
        return gradients[0].clone(), None


class Gradient(torch.autograd.Function):
    """Passes values through and notes where the gradient lies that it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[int]) -> Tensor:
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        made = gradients[0].clone()
        ctx.notes.append(made.data_ptr())
        return made, None


def test_autograd_adds_gradients_in_place_on_real_tensors() -> None:
    """The sum of two gradients lies where the first one lay: the fact behind the recorder's rule."""
    summed: list[int] = []
    returned: list[int] = []
    y = Address.apply(torch.ones(1000, requires_grad=True), summed)
    (Gradient.apply(y, returned) + Gradient.apply(y, returned)).sum().backward()
    assert summed == returned[:1]


def test_autograd_adds_to_no_view_of_a_gradient_on_real_tensors() -> None:
    """A first gradient that is a view holds its base, so that the sum lies in memory of its own."""
    summed: list[int] = []
    first: list[int] = []
    second: list[int] = []
    y = Address.apply(torch.ones(1000, requires_grad=True), summed)
    (Gradient.apply(y, second) + Gradient.apply(y.view(10, 100), first).view(1000)).sum().backward()
    assert len(summed) == 1
    assert summed[0] not in (*first, *second)


def test_a_view_of_a_gradient_is_not_added_to_in_place() -> None:
    """The sum of two branches takes a block where the gradient that comes first passed a view."""
    view_last = trace_of(
        lambda: Branches(lambda y: torch.tanh(y.view(-1)).view(y.shape) + torch.sigmoid(y)),
        job_of("7", mode=Mode.TRAIN),
        4,
    )
    view_first = trace_of(
        lambda: Branches(lambda y: torch.sigmoid(y) + torch.tanh(y.view(-1)).view(y.shape)),
        job_of("7", mode=Mode.TRAIN),
        4,
    )
    gradients = [
        story(trace)[story(trace).index("backward 1") :].count("+112 temporaries")
        for trace in (view_last, view_first)
    ]
    assert gradients == [3, 4]
    validate(view_first)


@pytest.mark.parametrize(
    ("function", "blocks"),
    [
        (lambda y: sum(torch.var_mean(y, 1)), 5),  # deviations, their gradient, that of the mean, their sum
        (lambda y: sum(torch.std_mean(y, 1)), 5),
        (lambda y: torch.var_mean(y, 1)[1] + (2 * y).sum(1), 3),  # the sum lies in the branch's gradient
        (lambda y: y * y, 3),  # two gradients of one tensor, which autograd adds
    ],
)
def test_what_a_node_adds_of_its_own_takes_a_block(function: Callable[[Tensor], Tensor], blocks: int) -> None:
    """Autograd adds gradients of branches in place, a formula of a node adds into a new tensor.

    The last block is the gradient of the weight for each sample.
    """
    trace = trace_of(lambda: Branches(function), job_of("7", mode=Mode.TRAIN), 4)
    lines = story(trace)
    assert lines[lines.index("backward 1") :].count("+112 temporaries") == blocks


def test_the_gradient_of_an_index_is_accumulated_where_its_zeros_lie() -> None:
    """`x[index]` has one block of zeros as its gradient, into which the rows are added."""
    rows = torch.tensor([0, 2, 2], device="meta")
    trace = trace_of(lambda: Branches(lambda y: y[:, rows].sum()), job_of("7", mode=Mode.TRAIN), 4)
    assert born(trace, "new_zeros") == [112]
    assert 112 not in born(trace, "index_put")
    validate(trace)


def test_gradients_of_two_branches_share_one_block() -> None:
    """On meta autograd adds out of place; the record shows the one block that a GPU would use."""
    trace = trace_of(Branches, job_of("7", mode=Mode.TRAIN), 4)
    backward = story(trace)[story(trace).index("backward 1") :]
    # gradients of tanh and sigmoid; no block for their sum; then the weight's product, before its sum over
    # rows
    assert [line for line in backward if line.startswith("+112")] == ["+112 temporaries"] * 3
    validate(trace)


def test_categories_follow_from_what_becomes_of_a_block() -> None:
    """Parameters and buffers, inputs, what backward needs, gradients, optimizer state, the rest."""
    trace = trace_of(
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()),
        job_of("6", mode=Mode.TRAIN, steps=2, optimizer=Optimizer.ADAM),
        8,
    )
    by_category: dict[Category, list[int]] = {}
    for event in trace.events:
        if isinstance(event, Alloc):
            by_category.setdefault(event.category, []).append(event.size_bytes)
    assert by_category[Category.PARAMETER] == [24, 24, 24, 24, 8]  # weight, bias, running statistics, count
    assert by_category[Category.INPUT] == [192, 192]
    assert by_category[Category.GRADIENT] == [24, 24] * 2
    assert (
        by_category[Category.OPTIMIZER] == [24] * 4
    )  # two moments of two parameters; the step counts are on the CPU
    assert by_category[Category.ACTIVATION] == [24, 24, 192, 4] * 2  # batch statistics, tanh, loss


@pytest.mark.parametrize("impl", OptimizerImpl)
def test_adam_takes_temporaries_as_its_implementation_does(impl: OptimizerImpl) -> None:
    """foreach takes temporaries of all parameters at once, the loop of one at a time, fused none.

    In the loop they are three: a root, its quotient, and the quotient of the parameter before, whose name
    lives.
    """
    model = lambda: nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(4)))  # noqa: E731
    job = job_of("50", mode=Mode.TRAIN, optimizer=Optimizer.ADAM, optimizer_impl=impl, steps=2)
    trace = trace_of(model, job, 2)
    lines = story(trace)
    step = lines[lines.index("optimizer 2") : lines.index("end 2")]
    level = peak = 0
    for line in step[1:]:
        size = abs(int(line.split()[0]))
        level += size if line.startswith("+") else -size
        peak = max(peak, level)
    assert peak == {"foreach": 4 * 10_000, "for-loop": 3 * 10_000, "fused": 0}[impl]


@pytest.mark.parametrize(
    ("position", "freed_in"),
    [
        (ZeroGrad.BEFORE_FORWARD, "forward 2"),
        (ZeroGrad.BEFORE_BACKWARD, "backward 2"),
        (ZeroGrad.AFTER_STEP, "optimizer 1"),
    ],
)
def test_gradients_are_freed_where_zero_grad_stands(position: ZeroGrad, freed_in: str) -> None:
    """The first phase in which the weight's gradient of the first step dies."""
    trace = trace_of(lambda: nn.Linear(11, 13), job_of("11", mode=Mode.TRAIN, steps=2, zero_grad=position), 2)
    gradients = [e.block for e in trace.events if isinstance(e, Alloc) and e.category is Category.GRADIENT]
    phase = ""
    for event in trace.events:
        if isinstance(event, PhaseStart):
            phase = f"{event.phase} {event.step}"
        elif isinstance(event, Free) and event.block == gradients[0]:
            assert phase == freed_in
            return
    raise AssertionError("the gradient never dies")


def test_kept_gradients_are_added_to_in_place() -> None:
    """With set_to_none=False the gradients of the first step serve for ever; later ones are added and die."""
    job = job_of("11", mode=Mode.TRAIN, steps=3, keep_grads=True)
    trace = trace_of(lambda: nn.Linear(11, 13, bias=False), job, 2)
    assert [
        e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.GRADIENT
    ] == [572]


def test_blocks_know_their_module_in_forward_and_backward() -> None:
    """A block of the backward pass belongs to the module whose forward made the node that runs."""
    model = lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))  # noqa: E731
    trace = trace_of(model, job_of("4", mode=Mode.TRAIN), 3)
    phase = Phase.SETUP
    seen: dict[Phase, list[str]] = {}
    for event in trace.events:
        if isinstance(event, PhaseStart):
            phase = event.phase
        elif isinstance(event, Alloc) and trace.sites[event.site].module:
            modules = seen.setdefault(phase, [])
            if trace.sites[event.site].module not in modules:
                modules.append(trace.sites[event.site].module)
    assert seen == {
        Phase.SETUP: ["0", "1.1"],
        Phase.FORWARD: ["0", "1.0", "1.1"],
        Phase.BACKWARD: ["1.1", "1.0", "0"],
    }


def test_shared_parameters_are_one_block() -> None:
    """Tied weights are moved to the device once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.two(self.one(x)))

    trace = trace_of(Tied, job_of("4"), 1)
    assert [
        e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.PARAMETER
    ] == [64]


def test_a_value_that_is_read_names_operator_module_and_line() -> None:
    """One line states what reads a value, and where."""

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    trace = trace_of(lambda: nn.Sequential(nn.Identity(), Reads()), job_of("4"), 1)
    assert trace.notes == (
        "module '1' calls aten._local_scalar_dense.default (test_recorder.py:"
        f"{Reads.forward.__code__.co_firstlineno + 1}: return x * x.sum().item()), which reads values: "
        "conditions on them are decided by random numbers on the CPU, not by data and trained weights",
    )


def test_a_read_is_named_by_its_own_line_if_another_error_is_raised_from_it() -> None:
    """Libraries that catch all exceptions raise such errors; on a GPU nothing is caught."""

    class Catches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return x * x.sum().item()
            except Exception as error:
                raise RuntimeError("no weights for this window") from error

    (note,) = trace_of(Catches, job_of("4"), 1).notes
    assert f":{Catches.forward.__code__.co_firstlineno + 2}: return x * x.sum().item()), which reads" in note


def test_a_shape_that_does_not_fit_names_the_module() -> None:
    """One line states in which module the shapes collide."""
    with pytest.raises(ModelError) as caught:
        trace_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)), job_of("4"), 2)
    assert str(caught.value).startswith("test: module '1' fails at batch 2")
    assert "\n" not in str(caught.value)


def test_a_failed_trace_leaves_torch_as_it_was() -> None:
    """Hooks, patches and registered kernels are gone after an error, and the next trace works."""
    with pytest.raises(ModelError):
        trace_of(lambda: nn.Linear(4, 4), job_of("5"), 2)
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert trace_of(lambda: nn.Linear(4, 4), job_of("4"), 2).events


def test_rms_norm_is_one_kernel() -> None:
    """Input and one figure per row are kept; the composite path of meta would keep three tensors."""
    trace = trace_of(lambda: nn.RMSNorm(8), job_of("5x8", mode=Mode.TRAIN), 3)
    forward = story(trace)
    assert forward[forward.index("forward 1") : forward.index("backward 1")] == [
        "forward 1",
        "+480 activations",  # the result: the loss is its sum, but the loop's name for it lives on
        "+60 activations",
        "+4 activations",
    ]
