"""Optimizers, clipping and averages take on meta what they take on CUDA; what is frozen takes nothing."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

from planner.capture.cuda.operators.semantics import cuda_semantics
from planner.capture.loop.optimizers import clip, make_ema
from planner.capture.loop.trainable import freeze_parameters
from planner.capture.recorder.recorder import Recorder
from planner.errors import UsageError
from planner.jobs import ClipGradients, Job, Mode, Optimizer, OptimizerImpl, merge_job
from planner.jobs.resolve import default_impl
from planner.program.events import Alloc, Category, Phase, PhaseStart, Trace
from planner.program.target import Target
from tests.helpers.models import AMPERE, job_of, trace_of


class Two(nn.Module):
    """A matrix M and a vector v."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(256, 300))
        self.vector = nn.Parameter(torch.empty(3_000))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix).sum() + self.vector.sum()


NAMES = {4 * 256 * 300: "M", 4 * 3_000: "v"}


def story(trace: Trace, phase: Phase, step: int) -> str:
    """Return the births and deaths of a phase: `+operator:size`, `-size`; a parameter's size by name."""
    steps: list[str] = []
    sizes: dict[int, str] = {}
    now = False
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = (event.phase, event.step) == (phase, step)
        elif isinstance(event, Alloc):
            size = sizes[event.block] = NAMES.get(event.size_bytes, str(event.size_bytes))
            op = trace.sites[event.site].op.removeprefix("aten.").partition(".")[0]
            steps += [f"+{op}:{size}"] * now
        elif now:
            steps.append(f"-{sizes[event.block]}")
    return " ".join(steps)


def job(optimizer: Optimizer, impl: OptimizerImpl, **fields: object) -> Job:
    """Two steps of training `Two`."""
    return job_of("256", mode=Mode.TRAIN, steps=2, optimizer=optimizer, optimizer_impl=impl, **fields)


def steps(optimizer: Optimizer, impl: OptimizerImpl) -> tuple[str, str]:
    """The story of the optimizer in the first and in the second step."""
    trace = trace_of(Two, job(optimizer, impl), 2)
    return story(trace, Phase.OPTIMIZER, 1), story(trace, Phase.OPTIMIZER, 2)


MOMENTS = "+zeros_like:M +zeros_like:M +zeros_like:v +zeros_like:v "
ADAM_LOOP = "+sqrt:M +div:M -M +sqrt:v +div:v -v -M -v"
ROOTS = "+_foreach_sqrt:M +_foreach_sqrt:v "
# Row and column sums of squares, 256 and 300 of them, and their product; then the same for the vector whole.
FACTORS = "+new_zeros:1024 +new_zeros:1200 +zeros_like:v "
NORM = "+linalg_vector_norm:4 -4 "
ADAFACTOR_FOREACH = (
    f"{NORM}+linalg_vector_norm:1024 -1024 +linalg_vector_norm:1200 -1200 +mm:M +mean:4 -4 {NORM}"
    f"{NORM}+_foreach_mul:v -v +clone:v -M {NORM}-v"
)
ADAFACTOR_LOOP = (
    f"{NORM}+linalg_vector_norm:1024 +linalg_vector_norm:1200 +mm:M +mean:4 -4 {NORM}"
    f"{NORM}+mul:v +clone:v -M {NORM}-1024 -1200 -v -v"
)


@pytest.mark.parametrize(
    ("optimizer", "impl", "first", "later"),
    [
        ("sgd", "foreach", "", ""),
        ("sgd", "for-loop", "", ""),
        ("sgd", "fused", "", ""),
        ("momentum", "foreach", "+clone:M +clone:v", ""),
        ("momentum", "for-loop", "+clone:M +clone:v", ""),
        ("momentum", "fused", "+empty_like:M +empty_like:v", ""),
        ("nesterov", "foreach", "+clone:M +clone:v", ""),
        ("nesterov", "for-loop", "+clone:M +add:M -M +clone:v +add:v -v", "+add:M -M +add:v -v"),
        ("nesterov", "fused", "+empty_like:M +empty_like:v", ""),
        ("adam", "foreach", f"{MOMENTS}{ROOTS}-v -M", f"{ROOTS}-v -M"),
        ("adam", "for-loop", f"{MOMENTS}{ADAM_LOOP}", ADAM_LOOP),
        (
            *("adam", "fused"),
            "+zeros:4 +zeros_like:M +zeros_like:M +zeros:4 +zeros_like:v +zeros_like:v",
            "",
        ),
        ("adamw", "foreach", f"{MOMENTS}{ROOTS}-v -M", f"{ROOTS}-v -M"),
        ("adamw", "for-loop", f"{MOMENTS}{ADAM_LOOP}", ADAM_LOOP),
        (
            *("adamw", "fused"),
            "+zeros:4 +zeros_like:M +zeros_like:M +zeros:4 +zeros_like:v +zeros_like:v",
            "",
        ),
        ("rmsprop", "foreach", f"+zeros_like:M +zeros_like:v {ROOTS}-v -M", f"{ROOTS}-v -M"),
        ("rmsprop", "for-loop", "+zeros_like:M +zeros_like:v +sqrt:M +sqrt:v -M -v", "+sqrt:M +sqrt:v -M -v"),
        *[("adagrad", "foreach", *[f"{ROOTS}+_foreach_mul:M +_foreach_mul:v -v -M -v -M"] * 2)],
        *[("adagrad", "for-loop", *["+sqrt:M +sqrt:v -M -v"] * 2)],
        ("adagrad", "fused", "", ""),
        ("adafactor", "foreach", f"{FACTORS}{ADAFACTOR_FOREACH}", ADAFACTOR_FOREACH),
        ("adafactor", "for-loop", f"{FACTORS}{ADAFACTOR_LOOP}", ADAFACTOR_LOOP),
    ],
)
def test_what_a_step_takes(optimizer: str, impl: str, first: str, later: str) -> None:
    """State is made in the first step and stays; temporaries live as long as torch's code holds them."""
    assert steps(Optimizer(optimizer), OptimizerImpl(impl)) == (first, later)


@pytest.mark.parametrize(
    ("impl", "made"),
    [
        (OptimizerImpl.FOREACH, "+full_like:M +full_like:v"),
        (OptimizerImpl.FUSED, "+zeros:4 +full_like:M +zeros:4 +full_like:v"),
    ],
)
def test_adagrad_makes_its_state_before_the_loop(impl: OptimizerImpl, made: str) -> None:
    """Adagrad's sums are there before the first step; its counters are on the GPU only where it is fused."""
    steps = story(trace_of(Two, job(Optimizer.ADAGRAD, impl), 2), Phase.SETUP, 0)
    assert steps == f"+to:M +to:v {made}"


@pytest.mark.parametrize("kind", Optimizer)
def test_the_defaults_are_those_of_cuda(kind: Optimizer) -> None:
    """An optimizer that is given no option takes the default implementation, as it does on CUDA."""
    constructors: dict[Optimizer, Callable[..., optim.Optimizer]] = {
        Optimizer.SGD: optim.SGD,
        Optimizer.MOMENTUM: lambda trained: optim.SGD(trained, momentum=0.9),
        Optimizer.NESTEROV: lambda trained: optim.SGD(trained, momentum=0.9, nesterov=True),
        Optimizer.ADAM: optim.Adam,
        Optimizer.ADAMW: optim.AdamW,
        Optimizer.RMSPROP: optim.RMSprop,
        Optimizer.ADAGRAD: optim.Adagrad,
        Optimizer.ADAFACTOR: optim.Adafactor,
    }
    expected = trace_of(Two, job(kind, default_impl(kind)), 2)
    default_options = lambda _kind, _impl, parameters, _arguments: constructors[kind](list(parameters))  # noqa: E731
    with mock.patch("planner.capture.loop.named_optimizers.build_optimizer", default_options):
        assert trace_of(Two, job(kind, default_impl(kind)), 2) == expected


@pytest.mark.parametrize(
    ("before", "options", "impl"),
    [
        ({}, {"optimizer": "adam"}, "foreach"),
        ({}, {"optimizer": "adafactor"}, "for-loop"),
        ({}, {"optimizer": "adafactor", "optimizer_impl": "foreach"}, "foreach"),
        ({"optimizer": "adafactor", "optimizer_impl": "for-loop"}, {"optimizer": "adam"}, "foreach"),
        ({"optimizer_impl": "fused"}, {"optimizer": "adam"}, "fused"),  # what was chosen stays chosen
    ],
)
def test_another_optimizer_has_its_own_default(
    before: dict[str, str], options: dict[str, str], impl: str
) -> None:
    """An optimizer that is named without an implementation gets the one that it has on CUDA."""
    job = merge_job(merge_job(Job.create("test"), before), options)
    assert (job.loop.optimizer, job.loop.optimizer_impl) == (options["optimizer"], impl)


@pytest.mark.parametrize("kind", Optimizer)
def test_no_operator_of_an_optimizer_is_unknown(kind: Optimizer) -> None:
    """Each operator of a step has a rule or is declared free of scratch memory."""
    known = set(trace_of(Two, job_of("256"), 2).unknown_ops)  # those of the model itself
    for impl in OptimizerImpl:
        if impl is not OptimizerImpl.FUSED or kind not in (Optimizer.RMSPROP, Optimizer.ADAFACTOR):
            assert set(trace_of(Two, job(kind, impl), 2).unknown_ops) <= known


@pytest.mark.parametrize("kind", [Optimizer.RMSPROP, Optimizer.ADAFACTOR])
def test_not_all_are_fused(kind: Optimizer) -> None:
    """If torch has no fused implementation, the option is refused in one line."""
    with pytest.raises(UsageError, match=f"torch has no fused {kind}; choose foreach"):
        trace_of(Two, job(kind, OptimizerImpl.FUSED), 2)


# ---- clipping and averages


def record(model: nn.Module, body: Callable[[Recorder], None]) -> Trace:
    """The trace of what `body` does; set-up lasts until it marks another phase."""
    recorder = Recorder(model, Target.for_capability(AMPERE))
    with cuda_semantics(AMPERE):
        recorder.start_phase(0, Phase.SETUP)
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.record_tensor(tensor, Category.PARAMETER, "to", "")
        with recorder:
            body(recorder)
            recorder.start_phase(9, Phase.END)
        return recorder.finish(1)


def clipped(kind: ClipGradients, dtype: torch.dtype = torch.float32, stride: int = 1) -> Trace:
    """Clipping the gradients of `Two`; with a stride, those of the vector lie apart in memory."""
    with torch.device("meta"):
        model = Two().to(dtype)

    def body(recorder: Recorder) -> None:
        model.matrix.grad = torch.empty_like(model.matrix)
        model.vector.grad = torch.empty(3_000 * stride, dtype=dtype, device="meta")[::stride]
        recorder.start_phase(1, Phase.OPTIMIZER)
        clip(kind, model.parameters())

    return record(model, body)


def after_the_norms(size: int) -> str:
    """Norms are stacked, their norm and the factor of the gradients made from it; then all goes."""
    return (
        f"+stack:{2 * size} +linalg_vector_norm:{size} -{2 * size} -{size} -{size} +add:{size} "
        f"+reciprocal:{size} +mul:{size} -{size} -{size} +clamp:{size} -{size} -{size} -{size}"
    )


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_clipping_by_norm(dtype: torch.dtype, size: int) -> None:
    """Partial norms in float32, two for each parameter since the matrix has two chunks, are there first."""
    steps = story(clipped(ClipGradients.NORM, dtype), Phase.OPTIMIZER, 1)
    assert steps == f"+zeros:16 +empty:{size} +empty:{size} -16 {after_the_norms(size)}"


def test_clipping_by_norm_one_by_one() -> None:
    """Gradients with holes are not taken by the kernel for all: each norm is made by itself."""
    steps = story(clipped(ClipGradients.NORM, stride=2), Phase.OPTIMIZER, 1)
    assert steps == f"+linalg_vector_norm:4 +linalg_vector_norm:4 {after_the_norms(4)}"


@pytest.mark.parametrize("kind", [ClipGradients.VALUE, ClipGradients.NONE])
def test_clipping_by_value_takes_nothing(kind: ClipGradients) -> None:
    """Gradients are clamped in place, or left alone."""
    trace = clipped(kind)
    assert (story(trace, Phase.OPTIMIZER, 1), trace.unknown_ops) == ("", ())


class Counted(Two):
    """With buffers: 7 floats and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.empty(7))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))


def test_a_moving_average_is_a_copy() -> None:
    """An average holds all parameters and buffers; the first update copies, the others take the count."""
    with torch.device("meta"):
        model = Counted()

    def body(recorder: Recorder) -> None:
        average = make_ema(model)
        for step in (1, 2, 3):
            recorder.start_phase(step, Phase.OPTIMIZER)
            average.update_parameters(model)
        recorder.start_phase(3, Phase.END)  # before the name `average` goes

    trace = record(model, body)
    assert story(trace, Phase.SETUP, 0).endswith("+clone:M +clone:v +clone:28 +clone:8")
    steps = [story(trace, Phase.OPTIMIZER, step) for step in (1, 2, 3)]
    assert steps == ["", "+_to_copy:8 -8", "+_to_copy:8 -8"]


def test_clipping_and_averages_run_on_real_tensors() -> None:
    """The functions of the traced loop clip real gradients and average real parameters."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = make_ema(model)
    model.weight.grad = torch.tensor([[3.0, -4.0]])
    clip(ClipGradients.NORM, model.parameters())
    assert model.weight.grad.tolist() == [[pytest.approx(0.6), pytest.approx(-0.8)]]
    model.weight.grad = torch.tensor([[3.0, -0.5]])
    clip(ClipGradients.VALUE, model.parameters())
    assert model.weight.grad.tolist() == [[1.0, -0.5]]
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.fill_(2.0)
    average.update_parameters(model)
    assert average.module.weight.tolist() == [[pytest.approx(1.001)] * 2]


# ---- what is trained


class Adapted(nn.Module):
    """A frozen matrix with a product of two narrow ones beside it, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(100, 100)
        self.lora_A = nn.Linear(100, 3, bias=False)  # noqa: N815
        self.lora_B = nn.Linear(3, 100, bias=False)  # noqa: N815

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.lora_B(self.lora_A(x))).relu()


def adapted(**fields: object) -> Trace:
    """One step of AdamW on two of those, one after the other."""
    build = lambda: nn.Sequential(Adapted(), Adapted())  # noqa: E731
    return trace_of(build, job_of("100", mode=Mode.TRAIN, optimizer=Optimizer.ADAMW, **fields), 2)


def sizes(trace: Trace, category: Category) -> list[int]:
    return sorted(
        event.size_bytes for event in trace.events if isinstance(event, Alloc) and event.category is category
    )


LORA = [4 * 300] * 4


def test_only_adapters_are_trained() -> None:
    """Frozen weights have neither gradients nor moments, and inputs are not kept for gradients of theirs."""
    whole, part = adapted(), adapted(train_only=("*.lora_*",))
    assert sizes(part, Category.GRADIENT) == LORA
    assert sizes(part, Category.OPTIMIZER) == sorted(2 * LORA)
    assert len(sizes(whole, Category.GRADIENT)) == 8
    assert sizes(part, Category.PARAMETER) == sizes(whole, Category.PARAMETER)


def test_activations_are_kept_only_where_needed() -> None:
    """The first layer's output is kept for the weight of the second, and not if that is frozen as well."""
    layers = lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 30), nn.ReLU())  # noqa: E731
    saved = {
        patterns: sizes(
            trace_of(layers, job_of("10", mode=Mode.TRAIN, freeze=patterns), 2), Category.ACTIVATION
        )
        for patterns in ((), ("0.*",), ("0.*", "2.weight"))
    }
    first, second, loss = 4 * 2 * 20, 4 * 2 * 30, 4
    assert saved[()] == saved[("0.*",)] == [loss, first, second]
    assert saved[("0.*", "2.weight")] == [loss, second]


def names(**fields: object) -> list[str]:
    """The parameters that are trained."""
    with torch.device("meta"):
        model = Adapted()
    model.base.bias.requires_grad_(False)
    freeze_parameters(model, job_of("100", mode=Mode.TRAIN, **fields))
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("freeze", "train_only", "trained"),
    [
        ((), (), ["base.weight", "lora_A.weight", "lora_B.weight"]),
        (("lora_*",), (), ["base.weight"]),
        ((), ("base.*",), ["base.weight", "base.bias"]),  # exactly these, whatever the model sets
        (("*_A.*",), ("lora_*",), ["lora_B.weight"]),
        (("*.bias", "base.*"), (), ["lora_A.weight", "lora_B.weight"]),
    ],
)
def test_patterns(freeze: tuple[str, ...], train_only: tuple[str, ...], trained: list[str]) -> None:
    """`train_only` names exactly what is trained, `freeze` takes away from it."""
    assert names(freeze=freeze, train_only=train_only) == trained


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"freeze": ("bias",)},
            "--freeze 'bias': no parameter of test has such a name; some are base.bias",
        ),
        (
            {"train_only": ("Lora_*",)},  # names are case-sensitive everywhere
            "--train-only 'Lora_*': no parameter of test has such a name; some are base.weight, base.bias, "
            "lora_A.weight",
        ),
        (
            {"freeze": ("*",)},
            "--freeze: no parameter of test is left to train; use fewer patterns",
        ),
    ],
)
def test_patterns_that_make_no_sense(fields: dict[str, tuple[str, ...]], line: str) -> None:
    """A pattern that matches nothing, or everything, is refused in one line."""
    with pytest.raises(UsageError) as caught:
        names(**fields)
    assert str(caught.value) == line


def test_nothing_needs_to_be_trained_in_inference() -> None:
    """Without a training step, all parameters may be frozen."""
    trace = trace_of(Two, job_of("256", mode=Mode.INFER, freeze=("*",)), 2)
    assert sizes(trace, Category.ACTIVATION) == []
